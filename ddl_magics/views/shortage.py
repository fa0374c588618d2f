"""The memory of every rank at the moment when one had none left, in characters: what the error of such a cell shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddl_magics.protocol import MEMORY_KINDS
from ddl_magics.telemetry.history import by_kind
from ddl_magics.views import format as fmt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.protocol import Outcome

ERRORS = {"OutOfMemoryError", "MemoryError"}
"""Names of the errors that say that memory was short."""
SHOWN = 16
"""Ranks that have a line; of more, those with the most memory."""


def memory_table(outcomes: Sequence[Outcome]) -> str:
    """One line a rank, by kind; empty where no rank told its memory."""
    told = [outcome for outcome in outcomes if outcome.memory]
    if not told:
        return ""
    fullest = sorted(told, key=lambda outcome: -outcome.memory.get("total", 0))[:SHOWN]
    unit = fmt.byte_unit(fullest[0].memory.get("total", 0))
    kinds = [kind for kind in MEMORY_KINDS if any(by_kind(outcome.memory)[kind] for outcome in fullest)]
    rows = [("rank", *kinds, "total", "capacity")]
    for outcome in sorted(fullest, key=lambda outcome: outcome.rank):
        memory = outcome.memory
        held = by_kind(memory)
        rows.append((
            str(outcome.rank),
            *(unit.digits(held[kind]) for kind in kinds),
            unit.digits(memory.get("total", 0)),
            fmt.size(memory["capacity"]) if memory.get("capacity") else fmt.NOTHING,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"Memory when the cell ended on each rank, {unit.name}:", *lines])
