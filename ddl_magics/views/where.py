"""Where every rank is (`%ddl where`): who waits for whom, then the ranks by equal stacks, the user's own frames first.

The same lines for HTML, a terminal and plain text. Ranks are folded and groups are capped, so that it stays a page with
any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ddl_magics import waits
from ddl_magics.views import format as fmt
from ddl_magics.views.holdups import called, calls, sentences
from ddl_magics.views.palette import STATES, WARNING
from ddl_magics.views.ranges import in_words
from ddl_magics.views.standing import at_line, cut
from ddl_magics.views.status import TABLE_STYLE
from ddl_magics.views.table import show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ddl_magics.views.screen import Screen
    from ddl_magics.views.text import Line

ANSWER_S = 1.0
"""Seconds that ranks have to answer; the others are named."""
MAX_GROUPS = 12
MAX_OWN_FRAMES = 6
WORDS = {
    "idle": "idle",
    "ended": "ended the cell",
    "outside": "not in this cell",
    "dead": "dead",
    "silent": f"no answer within {ANSWER_S:g} s",
    "released": "freed from a collective",
    "stopped": "stopped at a breakpoint",
}
"""State of ranks -> what is said of them."""

Frame = tuple[str, bool]
"""One line of text, and whether the frame is the user's own."""


@dataclass(frozen=True)
class Group:
    """Ranks with equal stacks."""

    ranks: tuple[int, ...]
    state: str
    place: str
    """`all_reduce, cell line 12: dist.all_reduce(x)`."""
    frames: tuple[Frame, ...]
    """The callers, innermost first; with `--full` every frame."""
    seconds: float = 0.0
    """For how long, the longest of them; 0 where that says nothing."""

    @property
    def title(self) -> str:
        lasted = f"  ({fmt.waited(self.seconds)})" if self.seconds >= 1 else ""
        return f"{in_words(self.ranks)}: {self.place}{lasted}"


@dataclass(frozen=True)
class Where:
    """All that is shown."""

    sentences: tuple[str, ...]
    groups: tuple[Group, ...]
    more: str
    """What was left out."""


def where(
    answers: Mapping[int, Mapping[str, Any]],
    world: int,
    *,
    ended: Collection[int] = (),
    rank: int | None = None,
    full: bool = False,
) -> Where:
    """What is to be said of the ranks.

    Parameters
    ----------
    answers
        By rank, those to the request `stack`; `{"state": "dead"}` and `{"state": "outside"}` may stand for others.
    world
        Number of ranks. Those that are not in `answers` have not answered.
    ended
        Ranks whose cell is over, while it runs on others.
    rank
        Show this rank's stack only.
    full
        Show every frame, not the user's own alone.
    """
    known = {r: answers.get(r, {"state": "silent"}) for r in range(world)}
    folded = _folded({r: known[r] for r in ([rank] if rank is not None else known)}, world, ended, full=full)
    shown = folded[:MAX_GROUPS]
    left = sum(len(group.ranks) for group in folded[len(shown) :])
    more = f"and {fmt.plural(left, 'more rank')} elsewhere: %ddl where --rank R shows one" if left else ""
    held = sentences(waits.holdups(answers, ended), world)
    return Where(tuple(held), tuple(shown), more)


def where_lines(shown: Where) -> list[Line]:
    """In characters."""
    lines: list[Line] = [[(text, "warn")] for text in shown.sentences]
    if lines:
        lines.append([])
    for group in shown.groups:
        lines.append([("● ", group.state), (group.title, "bold")])
        lines += [[(f"    {text}", "" if own else "dim")] for text, own in group.frames]
    if shown.more:
        lines.append([(shown.more, "dim")])
    return lines


def show_where(shown: Where, screen: Screen) -> None:
    """On a screen."""
    show(where_html(shown), where_lines(shown), screen)


def where_html(shown: Where) -> str:
    """As a piece of HTML that stands alone."""
    said = "".join(f'<div class="warn" style="color:{WARNING}">{escape(text)}</div>' for text in shown.sentences)
    groups = "".join(map(_group_html, shown.groups))
    more = f'<div style="opacity:.72">{escape(shown.more)}</div>' if shown.more else ""
    return f'<style>{TABLE_STYLE}</style><div class="ddl-table">{said}{groups}{more}</div>'


def _group_html(group: Group) -> str:
    colour = STATES.get(group.state, STATES["dead"])[0]
    dot = f'<span style="color:{colour}">●</span>'
    code = "font-family:var(--jp-code-font-family,monospace);font-size:12px;margin-left:24px;overflow-wrap:anywhere"
    frames = "".join(
        f'<div style="{code}{"" if own else ";opacity:.72"}">{escape(text)}</div>' for text, own in group.frames
    )
    return f'<div style="margin-top:4px">{dot} <b>{escape(group.title)}</b></div>{frames}'


def _folded(answers: Mapping[int, Mapping[str, Any]], world: int, ended: Collection[int], *, full: bool) -> list[Group]:
    found: dict[Group, tuple[list[int], list[float]]] = {}
    for rank, answer in answers.items():
        group = _group(answer, world, ended=rank in ended, full=full)
        ranks, seconds = found.setdefault(replace(group, seconds=0.0), ([], []))
        ranks.append(rank)
        seconds.append(group.seconds)
    return [replace(group, ranks=tuple(ranks), seconds=max(seconds)) for group, (ranks, seconds) in found.items()]


def _group(answer: Mapping[str, Any], world: int, *, ended: bool, full: bool) -> Group:
    """The group of one rank, without its ranks."""
    state = "ended" if ended and answer["state"] == "idle" else answer["state"]
    seconds = answer.get("seconds", 0.0)
    if state in ("idle", "ended", "outside", "dead", "silent"):
        return Group((), state, WORDS[state], (), seconds if state == "idle" else 0.0)
    waiting = waits.waiting_of(answer)
    line, source = answer.get("line"), answer.get("source") or ""
    doing = called(waiting, world) if waiting else WORDS.get(state) or calls(source)
    at = at_line(line, source) or "in no line of the cell"
    stack = answer.get("stack") or ()
    frames = _every(stack) if full else _callers(stack)
    return Group((), state, ", ".join(part for part in (doing, at) if part), frames, seconds)


def _every(stack: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return tuple((_frame(frame), frame["user"]) for frame in reversed(stack))


def _callers(stack: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
    """The user's own frames but the innermost line of the cell, which the title names."""
    own = [frame for frame in reversed(stack) if frame["user"]]
    titled = next((i for i, frame in enumerate(own) if frame.get("cell", True)), None)
    rest = [frame for i, frame in enumerate(own) if i != titled]
    shown = [(_frame(frame), True) for frame in rest[:MAX_OWN_FRAMES]]
    left = len(rest) - len(shown)
    return (*shown, *([(f"and {fmt.plural(left, 'more frame')}: --full shows all", False)] if left else []))


def _frame(frame: Mapping[str, Any]) -> str:
    place = (
        f"cell line {frame['line']}" if frame.get("cell", frame["user"]) else f"{_short(frame['file'])}:{frame['line']}"
    )
    inside = "" if frame["function"] == "<module>" else f", in {frame['function']}"
    source = cut(frame["source"])
    return f"{place}{inside}" + (f": {source}" if source else "")


def _short(file: str) -> str:
    """A file's name from its package on: `torch/distributed/distributed_c10d.py`."""
    parts = PurePath(file).parts
    for home in ("site-packages", "dist-packages"):
        if home in parts:
            return "/".join(parts[parts.index(home) + 1 :])
    return "/".join(parts[-2:]) if len(parts) > 1 else file
