"""Pictures, tables and results of N ranks as they come: each waits a moment for its twins, equal ones are shown once.

What a rank draws over and over under one display id (a progress bar) stays one picture, that of the lowest rank that
shares it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddl_magics.views.outputs import fold_outputs

if TYPE_CHECKING:
    from ddl_magics.views.screen import Screen

TWINS_S = 0.3
"""Seconds that a picture waits for those of the other ranks."""


@dataclass
class _Waiting:
    """A picture that waits for its twins."""

    rank: int
    data: dict[str, Any]
    display_id: str | None
    since: float


class RichOutput:
    """Rich messages of a cell's ranks in, pictures on a screen out."""

    def __init__(self, screen: Screen, ranks: list[int]) -> None:
        self._screen = screen
        self._ranks = ranks
        self._waiting: list[_Waiting] = []
        self._results: dict[int, dict[str, Any]] = {}
        self._leaders: dict[str, int] = {}
        """By display id of the ranks: the rank whose updates are shown."""

    def take(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        """Take one message; kinds that draw nothing are ignored."""
        display_id = content.get("transient", {}).get("display_id")
        if kind == "execute_result":
            self._results[rank] = content["data"]
        elif kind == "display_data":
            self._waiting.append(_Waiting(rank, content["data"], display_id, time.monotonic()))
        elif kind == "update_display_data":
            self._update(rank, display_id, content["data"])

    def _update(self, rank: int, display_id: str | None, data: dict[str, Any]) -> None:
        for waiting in self._waiting:
            if waiting.display_id == display_id and waiting.rank == rank:
                waiting.data = data
                return
        if display_id and self._leaders.get(display_id) == rank:
            self._screen.display(data, display_id, update=True)

    def flush(self, *, final: bool) -> None:
        """Show what has waited long enough or has all its twins; with `final` everything, then the results."""
        while self._waiting and (final or self._due()):
            # One picture of each rank at a time: the second of a rank is a twin of the others' second.
            firsts = {waiting.rank: waiting for waiting in reversed(self._waiting)}
            self._waiting = [waiting for waiting in self._waiting if firsts[waiting.rank] is not waiting]
            ready = [firsts[rank] for rank in sorted(firsts)]
            self._show([(w.rank, w.data) for w in ready], {w.rank: w.display_id for w in ready})
        if final and self._results:
            results, self._results = self._results, {}
            self._show(sorted(results.items()), {})

    def _due(self) -> bool:
        oldest = min(waiting.since for waiting in self._waiting)
        return time.monotonic() - oldest > TWINS_S or {w.rank for w in self._waiting} >= set(self._ranks)

    def _show(self, outputs: list[tuple[int, dict[str, Any]]], display_ids: dict[int, str | None]) -> None:
        for folded in fold_outputs(outputs, labelled=len(self._ranks) > 1):
            display_id = display_ids.get(folded.ranks[0])
            if display_id:
                self._leaders.setdefault(display_id, folded.ranks[0])
            *before, data = folded.displays()
            for label in before:
                self._screen.display(label)
            self._screen.display(data, display_id)
