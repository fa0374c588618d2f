"""Numbers and sentences that a running cell leaves for the sampler's thread to send.

The cell's thread only puts things down: a loss on a GPU is copied aside and read when it is there, so that training
never waits for the panel. Everything is bounded: when nobody drains, the oldest go. Times are Unix time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.protocol import Point, Progress
from ddl_magics.rank.device import Number

if TYPE_CHECKING:
    from ddl_magics.rank.device import Device, Reading

POINTS = 20_000
"""Points kept between two drains."""
NOTES = 100
"""Sentences kept between two drains, and remembered in one run so that none is said twice."""

PATIENCE = 5.0
"""Seconds that the last drain of a run waits for values: a device that hangs must not keep the cell."""


@dataclass(frozen=True)
class _Pending:
    name: str
    step: int
    value: Reading
    weight: Reading
    time: float

    def ready(self) -> bool:
        return self.value.ready() and self.weight.ready()

    def point(self) -> Point:
        return Point(self.name, self.step, self.value.value(), self.time, self.weight.value())


class Recorder:
    """What one rank records in one run; every method may be called from any thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._start("")

    def _start(self, run: str) -> None:
        self.run = run
        self._pending: deque[_Pending] = deque()
        self._progress: Progress | None = None
        self._notes: list[str] = []
        self._said: set[str] = set()
        self._lost = 0

    def start_run(self, run: str) -> None:
        """Begin a run; what the last one left undrained is dropped."""
        with self._lock:
            self._start(run)

    def record(self, name: str, step: int, value: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Put down one value of a metric; a tensor must have one element and may still be computed.

        A reading of a GPU tensor costs one small copy on the stream and one event, and does not wait.
        """
        pending = _Pending(name, step, self._reading(value), self._reading(weight), time.time())
        with self._lock:
            if len(self._pending) >= POINTS:
                self._pending.popleft()
                self._lost += 1
            self._pending.append(pending)

    def _reading(self, value: float | torch.Tensor) -> Reading:
        if isinstance(value, torch.Tensor):
            return self._device.read(value.detach().reshape(()))
        return Number(float(value))

    def progress(self, progress: Progress) -> None:
        """Replace what is known of how far the loop is."""
        with self._lock:
            self._progress = progress

    def note(self, text: str) -> bool:
        """Leave a sentence for the user; the same one is said once in a run. Whether it was new."""
        with self._lock:
            new = text not in self._said and len(self._said) < NOTES
            if new:
                self._said.add(text)
                self._notes.append(text)
            return new

    def drain(self, *, final: bool = False) -> dict[str, Any]:
        """Take what is there: `points` whose values are there, in order, the latest `progress`, new `notes`.

        `final`, for the last drain of a run: go on polling for values that the device still computes, for at most
        `PATIENCE` seconds.
        """
        deadline = time.monotonic() + (PATIENCE if final else 0.0)
        points = self._ready_points()
        while self._pending and time.monotonic() < deadline:
            time.sleep(0.002)
            points += self._ready_points()
        with self._lock:
            notes, self._notes = self._notes, []
            if self._lost:
                notes.append(f"{self._lost} points of the curves were dropped: they came faster than they were sent.")
                self._lost = 0
            return {"points": tuple(points), "progress": self._progress, "notes": tuple(notes)}

    def _ready_points(self) -> list[Point]:
        points: list[Point] = []
        with self._lock:
            while self._pending and self._pending[0].ready():
                points.append(self._pending.popleft().point())
        return points
