"""Where this rank's main thread is, seen from another thread: the user's line, the whole stack, the collective.

Works while the main thread is blocked in C++: its Python frames stand still then, and so does the place that is told.
"""

from __future__ import annotations

import dataclasses
import linecache
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddl_magics.rank import collectives

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ddl_magics.protocol import Waiting

PACKAGE = str(Path(__file__).parents[1])
LIBRARIES = tuple({*(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), PACKAGE})
CONTEXT = {f"{PACKAGE}/rank/{part}.py" for part in ("among", "context", "keeping", "scope", "speaking")}


@dataclasses.dataclass(frozen=True)
class Place:
    """One look at the main thread."""

    frame: FrameType | None
    line: int | None
    """Of the cell; the innermost one."""
    source: str
    of: str
    """`In[3]` where that line is of an earlier cell."""
    waiting: Waiting | None


class Whereabouts:
    """Looks at the main thread. `is_cell` tells whether a file name is a cell's, `cell_name` which: `In[3]`."""

    def __init__(self, is_cell: Callable[[str], bool], cell_name: Callable[[str], str] = str) -> None:
        self._is_cell = is_cell
        self._cell_name = cell_name
        self._main = threading.main_thread().ident or 0
        self._same: tuple[Any, float] = (None, 0.0)
        """A point-to-point call, which no recorder times, and since when it was seen."""

    def look(self) -> Place:
        """The user's line and the collective, if it waits in one."""
        frame = sys._current_frames().get(self._main)
        cells = [one for one in collectives.outwards(frame) if self._is_cell(one.f_code.co_filename)]
        waiting = collectives.under_way(frame)
        if waiting is not None:
            waiting = dataclasses.replace(self._timed(waiting, frame), call=_call_of_context(frame))
        if not cells:
            return Place(frame, None, "", "", waiting)
        innermost, file = cells[0], cells[0].f_code.co_filename
        of = "" if file == cells[-1].f_code.co_filename else self._cell_name(file)
        return Place(frame, innermost.f_lineno, _source(innermost), of, waiting)

    def stack(self) -> list[dict[str, Any]]:
        """Frames of the main thread, outermost first, from the cell inwards where there is one."""
        frames = []
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            frames.append(
                {
                    "file": frame.f_code.co_filename,
                    "line": frame.f_lineno,
                    "function": frame.f_code.co_name,
                    "source": _source(frame),
                    "user": self._is_user(frame.f_code.co_filename),
                    "cell": self._is_cell(frame.f_code.co_filename),
                }
            )
            frame = frame.f_back
        frames.reverse()
        first = next((i for i, told in enumerate(frames) if told["cell"]), None)
        return frames if first is None else frames[first:]

    def _is_user(self, file: str) -> bool:
        """Neither of Python, nor installed, nor ours."""
        return self._is_cell(file) or (file.startswith("/") and not file.startswith(LIBRARIES))

    def _timed(self, waiting: Waiting, frame: FrameType | None) -> Waiting:
        if waiting.number:
            return waiting
        key = (waiting.name, id(frame), frame.f_lasti if frame else 0)
        now = time.monotonic()
        if self._same[0] != key:
            self._same = key, now
        return dataclasses.replace(waiting, seconds=now - self._same[1])


def _call_of_context(frame: FrameType | None) -> str:
    """The call of `ddl` that the main thread is in: the outermost one."""
    call = ""
    while frame is not None:
        if frame.f_code.co_filename in CONTEXT and not frame.f_code.co_name.startswith("_"):
            call = f"ddl.{frame.f_code.co_name}"
        frame = frame.f_back
    return call


def _source(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
