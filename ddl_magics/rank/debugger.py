"""The standard library's debugger without a terminal: a line of the user goes in, the text that it gives comes out.

`Commands` is `pdb.Pdb` with its reading of a prompt taken away and its words for files made those of a notebook;
`postmortem` and `breakpoints` say what it looks at. Commands that read further lines themselves (`interact`, `debug`,
`commands`) have nobody to read from and say so.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import io
import pdb  # noqa: T100 - it is what this module is about
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from ddl_magics.rank.whereabouts import LIBRARIES

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

MOST = 100_000
"""Characters of one answer; a list of a million numbers should not fill the notebook."""


@functools.cache  # a step asks at every line
def is_own(filename: str) -> bool:
    """Whether a file is the user's: a cell's or one of their modules, not an installed library's and none of ours."""
    return not filename.startswith(("<", *LIBRARIES))


def write_back_locals(frame: FrameType) -> None:
    """Make what was assigned to a function's `f_locals` its variables.

    Before Python 3.13 (PEP 667) they are a copy, and the next look at them takes the old values again.
    """
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_NEWLOCALS:  # a function's, not a cell's
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


class Commands(pdb.Pdb):
    """Executes lines in frames.

    Parameters
    ----------
    name_of
        How a file is called for the user: `In[5]` for a cell.
    """

    def __init__(self, name_of: Callable[[str], str]) -> None:
        self.text = io.StringIO()
        super().__init__(stdin=io.StringIO(), stdout=self.text, nosigint=True, readrc=False)
        self.name_of = name_of

    def execute(self, line: str) -> tuple[str, bool]:
        """The text that a line gives, and whether the program is to go on. Ctrl-C ends the line, not the program."""
        goes_on = False
        self.cmdqueue = [line]  # `;;` adds what follows it
        try:
            with redirect_stdout(self.text):
                while self.cmdqueue and not goes_on:
                    goes_on = bool(self.onecmd(self.precmd(self.cmdqueue.pop(0))))
        except KeyboardInterrupt:
            self.error("KeyboardInterrupt")
        except Exception as error:  # noqa: BLE001 - of the command itself: the user sees it, and the prompt stays
            self.error(f"{type(error).__name__}: {error}")
        return self.taken(), goes_on

    def taken(self) -> str:
        """What was written since the last call."""
        text = self.text.getvalue()
        self.text.seek(0)
        self.text.truncate()
        if len(text) > MOST:
            half = MOST // 2
            text = f"{text[:half]}\n... {len(text) - MOST:,} characters left out ...\n{text[-half:]}"
        return text

    def show_here(self) -> None:
        """Write the entry of the frame that is looked at."""
        self.print_stack_entry(self.stack[self.curindex])

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """As pdb writes it, with a cell called by its number."""
        filename = self.canonic(frame_lineno[0].f_code.co_filename)
        return super().format_stack_entry(frame_lineno, lprefix).replace(filename, self.name_of(filename), 1)

    def default(self, line: str) -> None:
        """Execute a statement; what it assigns stays assigned."""
        super().default(line)
        if self.curframe is not None:
            write_back_locals(self.curframe)

    def do_here(self, arg: str) -> None:
        """Show the frame that is looked at."""
        self.show_here()

    def get_names(self) -> list[str]:
        """Leave out of `help` what cannot be done here."""
        missing = (Commands.do_interact, Commands.do_quit)
        return [name for name in super().get_names() if getattr(type(self), name, None) not in missing]

    def do_interact(self, arg: str) -> None:
        """Say that a command has nobody to read from."""
        self.error("this command reads lines of its own, which cannot be done on a rank")

    do_debug = do_commands = do_run = do_restart = do_interact

    def do_quit(self, arg: str) -> None:
        """`quit` is the prompt's word, and ends all ranks alike."""
        self.error("quit stands alone on its line")

    do_q = do_exit = do_EOF = do_quit  # noqa: N815 - the names are cmd.Cmd's


class FailedFrames(Commands):
    """Looks at the frames of an exception; the innermost of the user's own comes first, `down` goes on from there.

    Parameters
    ----------
    error
        The exception.
    is_first
        Whether a file is one with which the frames begin: a cell's.

    Raises
    ------
    ValueError
        It has no such frame.
    """

    def __init__(self, error: BaseException, is_first: Callable[[str], bool], name_of: Callable[[str], str]) -> None:
        super().__init__(name_of)
        if from_first(error, is_first) is None:
            raise ValueError("the exception came from no frame of the user's")
        self._is_first = is_first
        self._errors = [each for each in causes(error) if each.__traceback__]
        self._error = error
        self._look_at(error)

    def _look_at(self, error: BaseException) -> None:
        self._error = error
        self.reset()
        self.setup(None, from_first(error, self._is_first) or error.__traceback__)
        own = [at for at, (frame, _) in enumerate(self.stack) if is_own(frame.f_code.co_filename)]
        above = self.curindex - own[-1] if own else 0
        if above:
            self.onecmd(f"up {above}")
        else:
            self.show_here()

    def get_names(self) -> list[str]:
        """Leave the words that go on out of `help`."""
        return [name for name in super().get_names() if getattr(type(self), name, None) is not FailedFrames.do_next]

    def do_exceptions(self, arg: str) -> None:
        """List the exceptions that led to the failure; with a number look at the frames of that one."""
        if not arg:
            for number, error in enumerate(self._errors):
                self.message(f"{'>' if error is self._error else ' '} {number} {error!r}")
        elif arg.isdecimal() and int(arg) < len(self._errors):
            self._look_at(self._errors[int(arg)])
        else:
            self.error(f"there is no exception {arg}")

    def do_next(self, arg: str) -> None:
        """Say that there is nothing to go on with."""
        self.error("the cell has ended on this rank: there is nothing to go on with")

    do_n = do_s = do_step = do_r = do_return = do_unt = do_until = do_j = do_jump = do_next
    do_c = do_cont = do_continue = do_b = do_break = do_tbreak = do_next  # type: ignore[assignment]


def causes(error: BaseException) -> list[BaseException]:
    """An exception after those that it was raised from or while handling, as a traceback shows them."""
    found = [error]
    while (before := found[0].__cause__ or (None if found[0].__suppress_context__ else found[0].__context__)) and (
        before not in found
    ):
        found.insert(0, before)
    return found


def from_first(error: BaseException, is_first: Callable[[str], bool]) -> TracebackType | None:
    """The part of an error's traceback that begins with a file for which `is_first` holds; None without one."""
    traceback: Any = error.__traceback__
    while traceback and not is_first(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback  # type: ignore[no-any-return]
