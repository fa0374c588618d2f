"""When a prepared model's memory is looked at: by the thread that trains, at telling moments of a step.

Another thread must not read tensors meanwhile: torch's backward sets `.grad` without Python's lock, and a reader that
comes in between crashes the process. So other threads get the last look. No torch here.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 0.25
"""Shortest time between two looks at the same moment of a step."""

EAGER = 3
"""Looks at each moment that are taken at once: the optimizer's state comes with the first step."""


class Looks:
    """What was seen of one prepared model: bytes by kind."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._last: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._times: dict[str, tuple[int, float]] = {}
        """By moment: how often it was looked at, and when last."""

    def at(self, moment: str, measure: Callable[[], dict[str, int]]) -> None:
        """Look now, on the thread that trains, unless this moment of a step was looked at just before."""
        count, last = self._times.get(moment, (0, 0.0))
        if count >= EAGER and time.monotonic() - last < SECONDS:
            return
        self._thread = threading.get_ident()
        self._look(measure)
        self._times[moment] = (count + 1, time.monotonic())

    def now(self, measure: Callable[[], dict[str, int]]) -> dict[str, int]:
        """Measure, on the thread that trains; the last look on any other."""
        if threading.get_ident() == self._thread:
            self._look(measure)
        return dict(self._last)

    def peak(self) -> dict[str, int]:
        """Highest of each kind over the looks since `forget_peak`; from any thread."""
        return dict(self._peak)

    def forget_peak(self) -> None:
        """Let the peak begin anew."""
        self._peak = {}
        self._times = {}

    def _look(self, measure: Callable[[], dict[str, int]]) -> None:
        seen = measure()
        self._last = seen
        self._peak = {kind: max(size, self._peak.get(kind, 0)) for kind, size in seen.items()}
