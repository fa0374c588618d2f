"""Results and tracebacks of N ranks: equal ones once, with the ranks that share them."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddl_magics.views.ranges import in_words, ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddl_magics.protocol import Outcome
    from ddl_magics.views.screen import Bundle

ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
"""Addresses mean nothing across processes: `<Model at 0x7f31>` of two ranks is the same result."""
PROCESS = re.compile(r"ipykernel_\d+")
PEER = re.compile(r"\[[\w.:]+\]:\d+")
"""The other end of a connection, as gloo names it: its port is chance."""


@dataclass(frozen=True)
class Folded:
    """One result and the ranks that share it."""

    ranks: tuple[int, ...]
    data: Bundle
    """As the lowest of them sent it."""
    labelled: bool

    def displays(self) -> list[Bundle]:
        """What to show, in order: text carries its label, anything else has it in front."""
        if not self.labelled:
            return [self.data]
        label = f"[{ranges(self.ranks)}]"
        text = str(self.data.get("text/plain", ""))
        if set(self.data) <= {"text/plain"}:
            return [{"text/plain": f"{label}{_gap(text)}{text}"}]
        style = "font-family:monospace;font-size:90%;opacity:.7"
        heading = {"text/plain": label, "text/html": f'<span style="{style}">{html.escape(label)}</span>'}
        return [heading, self.data]


def fold_outputs(outputs: Iterable[tuple[int, Bundle]], *, labelled: bool = True) -> list[Folded]:
    """Group equal results; the order is that of the first rank of each. `labelled=False` where one rank runs alone."""
    groups: dict[str, tuple[list[int], Bundle]] = {}
    for rank, data in outputs:
        key = ADDRESS.sub("0x", json.dumps(data, sort_keys=True, default=str))
        groups.setdefault(key, ([], data))[0].append(rank)
    return [Folded(tuple(sorted(shared)), data, labelled) for shared, data in groups.values()]


def fold_tracebacks(outcomes: Sequence[Outcome], *, labelled: bool = True) -> list[tuple[tuple[int, ...], str]]:
    """The tracebacks of the ranks that failed, (ranks, text), equal ones once.

    The first to fail in time comes first: it is the likely cause. Ranks that were only released are left out, unless
    there is no other.
    """
    groups: dict[str, tuple[list[int], float, str]] = {}
    causes = [o for o in outcomes if o.status in ("error", "interrupted")]
    for outcome in sorted(causes or [o for o in outcomes if o.status == "released"], key=_order):
        text = "\n".join(outcome.traceback) or f"{outcome.ename}: {outcome.evalue}"
        key = _comparable(text)
        groups.setdefault(key, ([], _failed_at(outcome), text))[0].append(outcome.rank)
    folded = []
    for shared, _, text in groups.values():
        heading = f"On {in_words(shared)}:\n" if labelled else ""
        folded.append((tuple(sorted(shared)), heading + text))
    return folded


def cause_in_words(failed: Sequence[Outcome]) -> str:
    """Which ranks failed with what, the first in time first: the others may have failed because of it."""
    first = min(failed, key=_order)
    same = [o.rank for o in failed if _alike(o) == _alike(first)]
    others = [o.rank for o in failed if o.rank not in same]
    place = f" in line {first.line} of {first.of or 'the cell'}" if first.line else ""
    said = next(iter(first.evalue.strip().splitlines()), "")
    said = said if len(said) <= 200 else f"{said[:199]}…"
    message = f"{in_words(same)} failed{place} with {first.ename}" + (f": {said}" if said else "")
    return f"{message}; {in_words(others)} failed after that" if others else message


def _alike(outcome: Outcome) -> tuple[object, ...]:
    return outcome.ename, _comparable(outcome.evalue), outcome.line, outcome.of


def place_in_words(what: str, line: int | None, of: str = "") -> str:
    """`all_reduce, line 5`, and `all_reduce, line 5 of In[3]` for a line of an earlier cell."""
    return what + (f", line {line}" if line else "") + (f" of {of}" if line and of else "")


def waits_in_words(places: dict[int, str]) -> str:
    """`ranks 0,2-3 in all_reduce, line 5`, from the place of each rank."""
    by_place: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        by_place.setdefault(place, []).append(rank)
    return "; ".join(f"{in_words(ranks)} in {place}" for place, ranks in by_place.items())


def _comparable(text: str) -> str:
    """The text of an error without what differs from process to process."""
    return PEER.sub("", PROCESS.sub("", ADDRESS.sub("0x", text)))


def _order(outcome: Outcome) -> tuple[float, int]:
    return _failed_at(outcome), outcome.rank


def _failed_at(outcome: Outcome) -> float:
    return math.inf if outcome.failed_at is None else outcome.failed_at


def _gap(text: str) -> str:
    return "\n" if "\n" in text else " "
