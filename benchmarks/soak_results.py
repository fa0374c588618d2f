"""What came of the cells of a soak, and the tables of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.measure import grid
from benchmarks.soak_notebook import HELD

if TYPE_CHECKING:
    from benchmarks.soak_notebook import Held


@dataclass
class Result:
    """What came of one cell."""

    number: int
    row: str
    code: str
    problems: list[str] = field(default_factory=list)
    noticed: float | None = None
    """Seconds from the fault to its cause on the screen."""
    recovered: float | None = None
    """Seconds from the fault to the end of the next cell."""
    kept: bool | None = None
    """Whether variables and models were there after it; None where they cannot be."""


def spread(results: list[float | None]) -> str:
    """Median and maximum, in seconds."""
    known = [value for value in results if value is not None]
    return f"{statistics.median(known):.2f} / {max(known):.2f}" if known else "–"


def table(results: list[Result]) -> str:
    """One line a kind of fault."""
    lines = []
    for row in sorted({result.row for result in results}, key=lambda row: (row != "none", row)):
        those = [result for result in results if result.row == row]
        kept = [result.kept for result in those if result.kept is not None]
        lines.append([
            row, str(len(those)), spread([r.noticed for r in those]), spread([r.recovered for r in those]),
            f"{sum(kept)} of {len(kept)}" if kept else "–", str(sum(bool(r.problems) for r in those)),
        ])  # fmt: skip
    total = str(sum(bool(result.problems) for result in results))
    lines.append(["all", str(len(results)), "", "", "", total])
    head = [
        "fault",
        "tried",
        "noticed after, s (median / max)",
        "recovered after, s",
        "variables kept",
        "wrong verdicts",
    ]
    return grid(head, lines)


def held_table(held: dict[str, tuple[Held, Held]], longest: int, cells: int) -> str:
    """What processes held at first and at last: ranks over `longest` cells, the kernel over all."""
    lines = []
    for who, (first, last) in held.items():
        lines += [
            [who, "at first", *first.cells()],
            [who, f"after {cells if who == 'kernel' else longest} cells", *last.cells()],
        ]
    return grid(["process", "", *HELD], lines)
