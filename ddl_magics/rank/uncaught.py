"""An error of the user's that nobody caught, in a plain program: their own lines and one of ours, as in a notebook.

Limits: errors of libraries, and of ours that are no `DDLError`, keep Python's whole traceback.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ddl_magics.errors import DDLError

if TYPE_CHECKING:
    from types import TracebackType

OURS = Path(__file__).parents[1]


def install() -> None:
    """Show such errors so from now on; every other goes to whatever showed it before."""
    before = sys.excepthook
    if getattr(before, "of_ddl_magics", False):
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, DDLError):
            sys.stderr.write(in_lines(error, trace))
        else:
            before(kind, error, trace)

    show.of_ddl_magics = True  # type: ignore[attr-defined]
    sys.excepthook = show


def in_lines(error: DDLError, trace: TracebackType | None) -> str:
    """The user's frames, the innermost last, and the error in one line."""
    frames = [frame for frame in traceback.extract_tb(trace) if OURS not in Path(frame.filename).parents]
    return "".join([*traceback.format_list(frames), f"{type(error).__name__}: {error}\n"])
