"""Steps through a program that has stopped at a breakpoint, statement by statement of the cell.

IPython runs each top-level statement of a cell as a code object of its own. For pdb the statement's end would be the
program's, and what follows is IPython; here `next` goes from one statement of the cell to the next, and what lies
between them and outside the cell is never shown. Works on `bdb`'s interface to the interpreter's trace function.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ddl_magics.rank.debugger import Commands, is_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType


class Stepper(Commands):
    """Stops a program, and lets it go on for a line, a function, or for good.

    Parameters
    ----------
    name_of
        How a file is called for the user.
    is_cell
        Whether a file is a cell's.
    serve
        Called where the program has stopped, with the frame; returns when it is to go on.
    """

    def __init__(
        self, name_of: Callable[[str], str], is_cell: Callable[[str], bool], serve: Callable[[Stepper, FrameType], None]
    ) -> None:
        super().__init__(name_of)
        self._is_cell = is_cell
        self._serve = serve
        self._passes_libraries = True
        """`step` stops in code of the user only, also in what a library calls."""
        self._fresh = False
        """`breakpoint()` was called, and the program has not stopped yet."""
        self._until = 0
        """The line that `until` of a statement that has ended was about."""

    def begin(self, frame: FrameType) -> None:
        """Stop in this frame, as soon as it goes on."""
        self._passes_libraries = is_own(frame.f_code.co_filename)  # else somebody looks into one
        self._fresh, self._until = True, 0
        traced = list(outwards(frame))
        cell = [at for at, f in enumerate(traced) if self._is_cell(f.f_code.co_filename)]
        if cell:  # what is outside the cell is neither shown nor stopped in
            del traced[cell[-1] + 1 :]
        self.reset()
        self.botframe = traced[-1]
        self.set_step()
        for f in traced:
            f.f_trace = self.trace_dispatch
        sys.settrace(self.trace_dispatch)  # nothing of ours may be called after this

    def end(self) -> None:
        """The cell is over: forget its breakpoints, and the frames."""
        self.clear_all_breaks()
        self.forget()
        self.reset()

    def interaction(self, frame: FrameType | None, traceback: TracebackType | BaseException | None = None) -> None:
        """Serve; called by pdb where the program stops, since Python 3.13 with the exception itself."""
        assert frame is not None
        self._fresh = False
        self.setup(frame, traceback.__traceback__ if isinstance(traceback, BaseException) else traceback)
        self.preloop()
        try:
            self._serve(self, frame)
        finally:
            self.forget()

    def stop_here(self, frame: FrameType) -> bool:
        """Whether a step ends in this frame."""
        if self._passes_libraries and frame is not self.stopframe and not is_own(frame.f_code.co_filename):
            return False
        return super().stop_here(frame)

    def dispatch_call(self, frame: FrameType, arg: Any) -> Any:
        """A function is called: of interest is what the cell calls, and the next statement of the cell."""
        inside = self._is_inside(frame)
        if not inside and self._is_statement(frame):
            return self._next_statement(frame)
        return super().dispatch_call(frame, arg) if inside else None

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """A function returns: from a statement there is no caller to go on in, which `bdb` would trace."""
        traced = super().dispatch_return(frame, arg)
        if frame is self.botframe and frame.f_back and self._is_statement(frame):
            frame.f_back.f_trace = None
        return traced

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """A function returns. A statement's end is not shown, unless it is `breakpoint()` that ended it."""
        if frame is not self.botframe or not self._is_statement(frame):
            super().user_return(frame, return_value)
            return
        if self._fresh:
            self.interaction(frame)
        self._until = self.stoplineno if self.stopframe is frame and self.stoplineno > 0 else 0

    def _next_statement(self, frame: FrameType) -> Any:
        goes_on = self.stoplineno == -1
        self.botframe = frame
        if goes_on:
            self.set_continue()
        elif self._until:
            self.set_until(frame, self._until)
        else:
            self.set_step()
        self._until = 0
        return self.trace_dispatch

    def _is_inside(self, frame: FrameType) -> bool:
        return self.botframe is None or any(f is self.botframe for f in outwards(frame))

    def _is_statement(self, frame: FrameType) -> bool:
        return frame.f_code.co_name == "<module>" and self._is_cell(frame.f_code.co_filename)


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
