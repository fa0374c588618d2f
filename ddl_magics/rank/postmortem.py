"""The failed frames of this rank's last cell: kept until the next one, dropped at once when memory was what it lacked.

The functions are errands of the notebook, called in this rank's main thread while it is idle, so that tensors are
touched by the thread that owns them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.errors import DebugError
from ddl_magics.rank.debugger import FailedFrames, from_first
from ddl_magics.rank.engine import cell_name, is_cell_file, this_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.protocol import Outcome


class PostMortem:
    """What is left of a failed cell.

    Parameters
    ----------
    drop
        Forgets the interpreter's last exception, and with it the frames.
    """

    def __init__(self, drop: Callable[[], None]) -> None:
        self._drop = drop
        self.outcome: Outcome | None = None
        """Of the last cell, when it did not end well."""
        self.dropped = False
        """The frames were dropped for the memory that they held."""
        self.frames: FailedFrames | None = None

    def forget(self) -> None:
        """A new cell begins: let go of the frames, and of the tensors in them."""
        if self.frames:
            self.frames.forget()
        self.frames = self.outcome = None
        self.dropped = False
        self._drop()

    def ended(self, outcome: Outcome, *, keep_frames: bool) -> None:
        """A cell has ended. After a lack of memory its frames go at once, unless they are asked for."""
        if outcome.status == "ok":
            return
        self.outcome = outcome
        if out_of_memory(getattr(sys, "last_value", None)) and not keep_frames:
            self.dropped = True
            self._drop()

    def open(self) -> str:
        """Begin at the failed frame. Raises DebugError where there is none."""
        error = getattr(sys, "last_value", None)
        if self.outcome is None or error is None:
            raise DebugError("nothing failed in the last cell")
        if from_first(error, is_cell_file) is None:
            raise DebugError(f"{type(error).__name__} came before the first line of the cell ran: it has no frame")
        if self.frames:
            self.frames.forget()
        self.frames = FailedFrames(error, is_cell_file, cell_name)
        return f"{type(error).__name__}: {error}\n{self.frames.taken()}"


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or what it came from, says that memory was full: the device's or the host's."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _of_this_rank() -> PostMortem:
    return this_kernel().runner.post_mortem  # type: ignore[no-any-return]


def failure() -> dict[str, Any] | None:
    """How the last cell ended here, if not well, and whether its frames were dropped."""
    post_mortem = _of_this_rank()
    outcome = post_mortem.outcome
    return None if outcome is None else {
        "status": outcome.status, "ename": outcome.ename, "failed_at": outcome.failed_at,
        "dropped": post_mortem.dropped,
    }  # fmt: skip


def begin() -> str:
    """Begin at the failed frame: the exception and the frame's entry."""
    return _of_this_rank().open()


def command(line: str) -> str:
    """What a debugger's command gives in the frame that was left by the one before."""
    frames = _of_this_rank().frames
    if frames is None:
        raise DebugError("nothing is looked at on this rank")
    return frames.execute(line)[0]
