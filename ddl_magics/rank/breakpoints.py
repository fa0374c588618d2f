"""`breakpoint()` in a cell: this rank stops, says where, and serves debugger commands of the notebook until it goes on.

The main thread stops, as it does under pdb; commands arrive on the control thread and are handed over by a queue.
Limits: other threads and other processes (workers of a DataLoader) are not served and go on. A cell's statements are
run by IPython one by one, so `jump` stays inside one of them, and `step` at an `await` of the cell goes on to the end.
"""

from __future__ import annotations

import os
import pdb  # noqa: T100 - its set_trace is ours while a cell runs
import queue
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from IPython.core import debugger as ipython_debugger

from ddl_magics.rank.engine import RankKernel, cell_name, is_cell_file
from ddl_magics.rank.stepper import Stepper, outwards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from ddl_magics.rank.sampler import Sampler

WAYS_IN = ((sys, "breakpointhook"), (pdb, "set_trace"), (ipython_debugger, "set_trace"))
"""What a program calls to stop."""


class Breakpoints:
    """The breakpoints of this rank's cells."""

    def __init__(self, kernel: RankKernel, sampler: Sampler) -> None:
        self._kernel = kernel
        self._sampler = sampler
        self._lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._stepper: Stepper | None = None
        self._process = os.getpid()
        self._hook_at_start = sys.breakpointhook
        """debugpy's, which ipykernel imports."""
        self._ignored = False
        """Nobody can be asked about this cell."""

    @contextmanager
    def served(self) -> Iterator[None]:
        """While a cell runs, what stops a program stops it here; afterwards all is as it was."""
        originals = [(module, name, getattr(module, name)) for module, name in WAYS_IN]
        if sys.breakpointhook is self._hook_at_start:  # else a program has put its own there
            sys.breakpointhook = self._breakpoint
        pdb.set_trace = ipython_debugger.set_trace = self._set_trace
        traced = sys.gettrace()
        self._stepper = Stepper(cell_name, is_cell_file, self._serve)
        self._ignored = False
        try:
            yield
        finally:
            for module, name, original in originals:
                if getattr(module, name) in (self._breakpoint, self._set_trace):
                    setattr(module, name, original)
            sys.settrace(traced)
            self._stepper.end()
            self._stepper = None
            for name in ("__return__", "__exception__"):  # the debugger's; they would keep frames alive
                self._kernel.shell.user_ns.pop(name, None)

    def command(self, number: int, line: str, ignore: bool = False) -> bool:
        """Hand a line to the stopped main thread, which publishes the answer; False: it is not stopped.

        Parameters
        ----------
        number
            Comes back with the answer.
        line
            A command or a statement, as pdb takes it.
        ignore
            Do not stop again in this cell.
        """
        if not self._sampler.stopped:
            return False
        self._ignored = ignore
        self._lines.put((number, line))
        return True

    def _breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Do as `sys.breakpointhook` does, which asks PYTHONBREAKPOINT first."""
        wanted = os.environ.get("PYTHONBREAKPOINT")
        if wanted:
            return None if wanted == "0" else sys.__breakpointhook__(*args, **kwargs)  # noqa: T100
        return self._stop(sys._getframe(1))  # noqa: SLF001 - the documented way

    def _set_trace(self, *_: Any, **__: Any) -> None:
        self._stop(sys._getframe(1))  # noqa: SLF001 - the same

    def _stop(self, frame: FrameType) -> None:
        if self._ignored:
            return
        if os.getpid() != self._process:
            # A forked worker's sys.stderr leads nowhere; what its file descriptor gets is shown.
            os.write(2, b"breakpoint() in another process than the rank's own is passed over\n")
        elif threading.current_thread() is not threading.main_thread():
            _say("breakpoint() in another thread than the main one is passed over")
        elif self._stepper is None:
            _say("breakpoint() outside a cell is passed over")
        elif self._sampler.stopped:
            _say("breakpoint() in a line of the debugger is passed over")
        else:
            self._stepper.begin(frame)

    def _serve(self, stepper: Stepper, frame: FrameType) -> None:
        """Execute lines of the notebook until one lets the program go on."""
        stepper.show_here()
        self._lines = queue.SimpleQueue()
        self._sampler.stopped = True
        self._publish("ddl_stopped", {**_place(frame), "text": stepper.taken()})
        answer = {"number": 0, "text": ""}
        try:
            for number, line in iter(self._lines.get, None):
                text, goes_on = stepper.execute(line)
                answer = {"number": number, "text": text}
                if goes_on:
                    return
                self._publish("ddl_debug", answer)
        finally:
            self._sampler.stopped = False
            self._publish("ddl_resumed", answer)

    def _publish(self, kind: str, content: dict[str, Any]) -> None:
        """What was printed goes first."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._kernel.publish(kind, content)


def _place(frame: FrameType) -> dict[str, Any]:
    """Where a program has stopped, by the innermost line of a cell; without one, by the frame itself."""
    place = next((f for f in outwards(frame) if is_cell_file(f.f_code.co_filename)), frame)
    return {"file": cell_name(place.f_code.co_filename), "line": place.f_lineno}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - part of the cell's output, wherever it is called
