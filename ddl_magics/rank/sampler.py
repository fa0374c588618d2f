"""One thread on each rank that tells the notebook how the rank is: memory, state, the user's current line, new metrics.

It sends a small record once a second while a cell runs; the last one travels with the cell's outcome. It never calls a
collective and never starts or synchronises CUDA, so that it can tell of a rank that hangs.
"""

from __future__ import annotations

import linecache
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddl_magics.protocol import TELEMETRY, CellRequest, Sample, State

if TYPE_CHECKING:
    from types import FrameType

    from ddl_magics.rank.context import Context

PERIOD = 1.0
"""Seconds between two records."""

Publish = Callable[[str, dict[str, Any]], None]


class Sampler:
    """Takes samples of this rank and publishes them.

    `is_user_code` tells whether a file name is a cell's; `publish` sends a message of our own type, from any thread.
    """

    def __init__(self, context: Context, publish: Publish, is_user_code: Callable[[str], bool]) -> None:
        self.rank: int = context.world.rank
        self._context = context
        self._publish = publish
        self._is_user_code = is_user_code
        self._main = threading.main_thread().ident
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._request: CellRequest | None = None
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
        line, source = self._where()
        running = self._request
        return {
            "state": "running" if running else "idle",
            "seconds": time.monotonic() - self._since,
            "cell": running.cell if running else 0,
            "line": line,
            "source": source,
            "memory": self._context.memory(),
        }

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
        line, source = (None, "") if last else self._where()
        drained = self._context.recorder.drain(final=last)
        state: State = "idle" if last else "running"
        self._seq += 1
        return Sample(
            rank=self.rank,
            seq=self._seq,
            time=time.time(),
            cell=request.cell,
            run=request.run,
            state=state,
            line=line,
            source=source,
            memory=self._context.memory(),
            peak=self._context.peak_memory(),
            points=tuple(drained["points"]),
            progress=drained["progress"],
            notes=tuple(drained["notes"]),
            last=last,
        )

    def _where(self) -> tuple[int | None, str]:
        """Line number and text of the user's innermost line in the main thread."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)  # noqa: SLF001 - the documented way
        while frame and not self._is_user_code(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return None, ""
        return frame.f_lineno, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
