"""One thread on each rank that tells the notebook how the rank is: memory, state, the user's current line, new metrics.

It sends a small record once a second while a cell runs; the last one travels with the cell's outcome. It never calls a
collective and never starts or synchronises CUDA, so that it can tell of a rank that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddl_magics.protocol import TELEMETRY, CellRequest, Sample, State

if TYPE_CHECKING:
    from ddl_magics.rank.context import Context
    from ddl_magics.rank.rescue import Rescue
    from ddl_magics.rank.whereabouts import Place, Whereabouts

PERIOD = 1.0
"""Seconds between two records."""

Publish = Callable[[str, dict[str, Any]], None]


class Sampler:
    """Takes samples of this rank and publishes them.

    `publish` sends a message of our own type, from any thread.
    """

    def __init__(self, context: Context, publish: Publish, whereabouts: Whereabouts, rescue: Rescue) -> None:
        self.rank: int = context.world.rank
        self._context = context
        self._publish = publish
        self._whereabouts = whereabouts
        self._rescue = rescue
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._request: CellRequest | None = None
        self.stopped = False
        """At a breakpoint."""
        self._seq = 0
        self._since = time.monotonic()
        threading.Thread(target=self._loop, name="ddl sampler", daemon=True).start()

    def begin(self, request: CellRequest) -> None:
        """A cell begins: start its records."""
        self._context.recorder.start_run(request.run)
        with self._wake:
            self._request = request
            self._since = time.monotonic()
            self._wake.notify()

    def end(self) -> Sample:
        """The cell has ended: its last record, metrics that were still on the device included."""
        with self._lock:
            last = self._sample(self._running(), last=True)
            with self._wake:
                self._request = None
                self._since = time.monotonic()
        return last

    def state(self) -> dict[str, Any]:
        """What this rank does now, for a question that comes out of band."""
        running = self._request
        place = self._whereabouts.look() if running else None
        waiting = place.waiting if place else None
        return {
            "state": self._state(place) if place else "idle",
            "seconds": waiting.seconds if waiting else time.monotonic() - self._since,
            "cell": running.cell if running else 0,
            "line": place.line if place else None,
            "source": place.source if place else "",
            "of": place.of if place else "",
            "waiting": waiting.to_wire() if waiting else None,
            "memory": self._context.memory(),
        }

    def stack(self) -> dict[str, Any]:
        """The same with the frames of the main thread, outermost first."""
        return self.state() | {"stack": self._whereabouts.stack() if self._request else []}

    def _state(self, place: Place) -> State:
        if self.stopped:
            return "stopped"
        if self._rescue.waiting is not None:
            return "released"
        return "waiting" if place.waiting else "running"

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._request is not None)
                # A cell that is over sooner has sent its only record itself; one that begins meanwhile has a whole
                # period of its own, in which what is counted by cell begins anew.
                if self._wake.wait(PERIOD):
                    continue
            with self._lock:  # the last record must be the last
                if self._request is not None:
                    self._publish(TELEMETRY, self._sample(self._request, last=False).to_wire())

    def _running(self) -> CellRequest:
        if self._request is None:
            raise RuntimeError("no cell is running on this rank")
        return self._request

    def _sample(self, request: CellRequest, *, last: bool) -> Sample:
        place = None if last else self._whereabouts.look()
        drained = self._context.recorder.drain(final=last)
        self._seq += 1
        return Sample(
            rank=self.rank,
            seq=self._seq,
            time=time.time(),
            cell=request.cell,
            run=request.run,
            state=self._state(place) if place else "idle",
            line=place.line if place else None,
            source=place.source if place else "",
            waiting=place.waiting if place else None,
            memory=self._context.memory(),
            peak=self._context.peak_memory(),
            points=tuple(drained["points"]),
            progress=drained["progress"],
            notes=tuple(drained["notes"]),
            last=last,
        )
