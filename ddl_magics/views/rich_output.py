"""Pictures, tables and results of N ranks: equal ones once with the ranks that share them, others each under its own.

A picture waits a moment for its twins. What a rank draws over and over under one display id (a progress bar) stays one
picture, that of the lowest rank that shares it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddl_magics.views.ranges import ranges

if TYPE_CHECKING:
    from ddl_magics.views.screen import Screen

TWINS_S = 0.3
"""Seconds that a picture waits for those of the other ranks."""


@dataclass
class _Waiting:
    """A picture that waits: what it shows, since when, and on which ranks."""

    bundle: dict[str, Any]
    display_id: str | None
    since: float
    ranks: list[int] = field(default_factory=list)


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
        if kind == "execute_result":
            self._results[rank] = content["data"]
        elif kind == "display_data":
            self._display(rank, content)
        elif kind == "update_display_data":
            self._update(rank, content)

    def _display(self, rank: int, content: dict[str, Any]) -> None:
        key = _same(content["data"])
        for waiting in self._waiting:
            if rank not in waiting.ranks and _same(waiting.bundle) == key:
                waiting.ranks.append(rank)
                return
        display_id = content.get("transient", {}).get("display_id")
        self._waiting.append(_Waiting(content["data"], display_id, time.monotonic(), [rank]))

    def _update(self, rank: int, content: dict[str, Any]) -> None:
        display_id = content.get("transient", {}).get("display_id", "")
        for waiting in self._waiting:
            if waiting.display_id == display_id and rank in waiting.ranks:
                waiting.bundle = content["data"]
                return
        if self._leaders.get(display_id) == rank:
            self._screen.display(content["data"], display_id, update=True)

    def flush(self, *, final: bool) -> None:
        """Show what has waited long enough or has all its twins; with `final` everything, then the results."""
        now = time.monotonic()
        ready = [w for w in self._waiting
                 if final or now - w.since > TWINS_S or len(w.ranks) == len(self._ranks)]  # fmt: skip
        for waiting in ready:
            self._waiting.remove(waiting)
            self._show(waiting.bundle, waiting.ranks, "", waiting.display_id)
        if final:
            self._show_results()

    def _show_results(self) -> None:
        groups: dict[str, list[int]] = {}
        for rank, bundle in sorted(self._results.items()):
            groups.setdefault(_same(bundle), []).append(rank)
        for ranks in groups.values():
            self._show(self._results[ranks[0]], ranks, "Out", None)
        self._results.clear()

    def _show(self, bundle: dict[str, Any], ranks: list[int], word: str, display_id: str | None) -> None:
        label = f"{word}[{ranges(sorted(ranks))}]" if len(self._ranks) > 1 else ""
        only_text = set(bundle) == {"text/plain"}
        if label and only_text:
            text = str(bundle["text/plain"])
            bundle = {"text/plain": f"{label}:{chr(10) if chr(10) in text else ' '}{text}"}
        elif label:
            self._screen.write("stdout", f"{label}:\n")
        if display_id:
            self._leaders.setdefault(display_id, min(ranks))
        self._screen.display(bundle, display_id)


def _same(bundle: dict[str, Any]) -> str:
    """What two bundles share when they show the same."""
    return json.dumps(bundle, sort_keys=True, default=str)
