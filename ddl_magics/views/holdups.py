"""Who waits for whom, in words: one sentence a situation, ranks folded, whatever their number."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

from ddl_magics.views import format as fmt
from ddl_magics.views.ranges import in_words, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddl_magics.protocol import Waiting
    from ddl_magics.waits import Holdup, Party

MAX_PARTIES = 4
"""Places that a sentence names; the ranks at others are counted."""
MAX_SENTENCES = 3

WHY = {
    "different": "they never meet",
    "unequal": "they never meet, their tensors differ",
    "out of step": "they are out of step and never meet",
    "cycle": "they wait for one another",
}
"""Kind of a situation that never ends -> what is wrong."""
ELSEWHERE = {
    "ended": "{have} ended the cell",
    "outside": "{are} not in this cell",
    "idle": "{run} no cell",
    "dead": "{are} dead",
    "released": "{are} released",
    "silent": "{do} not answer",
}
"""State of ranks for whom others wait, with verbs that are put in the number of the ranks."""
VERBS = {"are": "is", "run": "runs", "do": "does", "have": "has", "wait": "waits"}
"""Of several ranks, and of one."""
PLAIN = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.If, ast.While)


def sentences(holdups: Sequence[Holdup], world: int) -> list[str]:
    """One sentence a situation, the first few.

    Parameters
    ----------
    holdups
        As `waits.holdups` orders them.
    world
        Number of ranks: a group that has fewer is named.
    """
    said = [sentence(holdup, world) for holdup in holdups[:MAX_SENTENCES]]
    left = len(holdups) - len(said)
    return [*said, f"and {fmt.plural(left, 'more group')} of waiting ranks"] if left else said


def sentence(holdup: Holdup, world: int) -> str:
    """`ranks 0,2-7 wait 34 s in all_reduce (cell line 12) for rank 1, which is in time.sleep (line 9)`."""
    if holdup.kind == "missing":
        return _for_whom(holdup, world)
    first, *_ = holdup.waiting
    places = _listed(holdup.waiting, lambda party: _part(party, holdup, world))
    who = in_words(first.ranks)
    places = f"{who} {_verb('are', first.ranks)}{places.removeprefix(who)}"
    lasted = f", for {_seconds(holdup.seconds)}" if _seconds(holdup.seconds) else ""
    return f"{places}{lasted}: {WHY[holdup.kind]}"


def called(waiting: Waiting | None, world: int = 0) -> str:
    """A collective as the user knows it, with its group where that is not everybody: `all_reduce of ranks 0-1`."""
    if waiting is None:
        return "a collective"
    group = f" of {in_words(waiting.group)}" if 0 < len(waiting.group) < world else ""
    inner = f" ({waiting.name})" if waiting.call and waiting.call.partition(".")[2] != waiting.name else ""
    return (waiting.call + inner if waiting.call else waiting.name or "a collective") + group


@functools.lru_cache(maxsize=1024)
def calls(source: str) -> str:
    """The function that a line of source calls, where it is a statement with one call: `time.sleep`.

    A line that begins a `for` or a `with` is left out: it is also where their loops and ends are.
    """
    source = source.strip()
    try:
        tree = ast.parse(f"{source} pass" if source.endswith(":") else source)
    except (SyntaxError, ValueError):
        return ""
    if len(tree.body) != 1 or not isinstance(tree.body[0], PLAIN):
        return ""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if len(found) != 1 or not isinstance(found[0].func, ast.Name | ast.Attribute):
        return ""
    name = ast.unparse(found[0].func)
    return name if name.replace(".", "").isidentifier() else ""


def _for_whom(holdup: Holdup, world: int) -> str:
    ranks = [rank for party in holdup.waiting for rank in party.ranks]
    lines = sorted({party.line for party in holdup.waiting if party.line is not None})
    at = f" (cell {'line' if len(lines) == 1 else 'lines'} {ranges(lines)})" if lines else ""
    lasted = f" {_seconds(holdup.seconds)}" if _seconds(holdup.seconds) else ""
    missing = _listed(holdup.missing, lambda party: _who_is_where(party, world), " and ")
    what = " and ".join(dict.fromkeys(called(party.waiting, world) for party in holdup.waiting[:MAX_PARTIES]))
    return f"{in_words(ranks)} {_verb('wait', ranks)}{lasted} in {what}{at} for {missing}"


def _who_is_where(party: Party, world: int) -> str:
    return f"{in_words(party.ranks)}, which {_where(party, world)}"


def _where(party: Party, world: int) -> str:
    at = f"line {party.line}" if party.line is not None else ""
    in_line = f" ({at})" if at else ""
    are = _verb("are", party.ranks)
    if party.state == "waiting":
        return f"{_verb('wait', party.ranks)} in {called(party.waiting, world)}{in_line}"
    if party.state == "stopped":
        return f"{are} stopped at a breakpoint{in_line}"
    if party.state in ELSEWHERE:
        return ELSEWHERE[party.state].format(**{verb: _verb(verb, party.ranks) for verb in VERBS})
    function = calls(party.source)
    if function:
        return f"{are} in {function}{in_line}"
    return f"{are} at {at}" if at else f"{_verb('run', party.ranks)}"


def _part(party: Party, holdup: Holdup, world: int) -> str:
    waiting = party.waiting
    line = f"line {party.line}" if party.line is not None else ""
    what = f"in {called(waiting, world)}"
    if holdup.kind == "unequal" and waiting is not None:
        shapes = ", ".join(f"[{', '.join(map(str, shape))}]" for shape in waiting.shapes)
        what += f" with {shapes} {waiting.dtype}".rstrip()
    elif holdup.kind == "out of step" and waiting is not None and waiting.number:
        what += f", number {waiting.number} of its group"
    return f"{in_words(party.ranks)} {what}" + (f" ({line})" if line else "")


def _listed(parties: Sequence[Party], say: Callable[[Party], str], last: str = ", ") -> str:
    """The first few parties, and how many ranks are elsewhere."""
    shown = parties if len(parties) <= MAX_PARTIES else parties[: MAX_PARTIES - 1]
    said = [say(party) for party in shown]
    left = sum(len(party.ranks) for party in parties[len(shown) :])
    if left:
        said.append(f"{fmt.plural(left, 'more rank')}")
    return ", ".join(said[:-1]) + (last if len(said) > 1 else "") + said[-1]


def _seconds(seconds: float) -> str:
    return fmt.waited(seconds) if seconds >= 1 else ""


def _verb(verb: str, ranks: Iterable[int]) -> str:
    return VERBS[verb] if len(set(ranks)) == 1 else verb
