"""A rank's process: an ipyparallel engine whose kernel runs our cells and answers out of band.

What we need of ipyparallel's and ipykernel's private interface on the rank's side stands here and nowhere else: the
kernel class that the engine makes, `do_execute`, a control-channel handler, a message type of our own on IOPub, and the
file names that cells are compiled under. tests/rank/test_engine_contract.py holds them.
Run as `python -m mpi4py -m ddl_magics.rank.engine`.
"""

from __future__ import annotations

import contextvars
import os
import signal
import sys
import threading
import traceback
from functools import partial
from typing import Any

from ipykernel.compiler import get_tmp_directory
from ipyparallel.engine import app
from ipyparallel.engine.kernel import IPythonParallelKernel

from ddl_magics.errors import UsageOnRankError
from ddl_magics.protocol import CellRequest
from ddl_magics.rank.signals import heard, undisturbed

_in_cell: contextvars.ContextVar[bool] = contextvars.ContextVar("in a cell")


class _MainThreadOnly:
    """What ipykernel 7 asks the thread of its shell channel for when a cell awaits; ipyparallel's engines have none."""

    parent_thread = threading.main_thread()


class RankKernel(IPythonParallelKernel):
    """The kernel of a rank."""

    control_msg_types = [*IPythonParallelKernel.control_msg_types, "ddl_request"]  # noqa: RUF012 - as upstream
    requests: dict[str, Any]
    """Answers by operation, filled in by `bootstrap`; each is called with the request on the control thread."""
    runner: Any = None
    """Runs cells around `execute`, see `rank.cell`; None until `bootstrap` put it there."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.requests = {}
        self.cell_parent: dict[str, Any] = {}
        self.shell.ask_exit = self.refuse_exit
        self.shell.showtraceback = self.show_traceback

    async def do_execute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run code; a `%%ddl` cell, known by its metadata, is run by the runner."""
        parent = self.get_parent("shell")
        wire = parent.get("metadata", {}).get("ddl")
        if wire is None or self.runner is None:
            with heard():
                return await super().do_execute(*args, **kwargs)  # type: ignore[no-any-return]
        code = kwargs["code"] if "code" in kwargs else args[0]
        request = CellRequest.from_wire({**wire, "code": code})
        self.cell_parent = parent

        async def execute() -> dict[str, Any]:
            before = getattr(self, "shell_channel_thread", None)
            self.shell_channel_thread: Any = _MainThreadOnly
            _in_cell.set(True)
            try:
                with heard():
                    return await super(RankKernel, self).do_execute(*args, **kwargs)  # type: ignore[no-any-return]
            finally:
                self.shell_channel_thread = before
                _in_cell.set(False)

        return await self.runner.run(request, execute)  # type: ignore[no-any-return]

    def do_apply(self, *args: Any, **kwargs: Any) -> Any:
        """Run an errand of the notebook."""
        with heard():
            return super().do_apply(*args, **kwargs)

    def pre_handler_hook(self) -> None:
        """Leave SIGINT to those who run the user's code, see `rank.signals`."""
        self.saved_sigint_handler = signal.getsignal(signal.SIGINT)

    def show_traceback(self, *args: Any, **kwargs: Any) -> None:
        """As IPython does, which takes seconds on a busy machine; an interrupt in it would bury the traceback."""
        with undisturbed():
            if sys.exc_info()[0] is KeyboardInterrupt:
                self._show_interrupt()
            else:
                type(self.shell).showtraceback(self.shell, *args, **kwargs)

    def _show_interrupt(self) -> None:
        """An interrupt may come at an instruction that has no line, and IPython cannot format such a frame."""
        kind, value, trace = self.shell._get_exc_info()
        try:
            lines = self.shell.InteractiveTB.structured_traceback(kind, value, trace, tb_offset=1)
        except Exception:  # noqa: BLE001 - whatever it stumbles over
            lines = traceback.format_exception(kind, value, trace)
        self.shell._showtraceback(kind, value, lines)

    def refuse_exit(self) -> None:
        """`exit()` in a cell would end this rank's process, and MPI all others with it."""
        raise UsageOnRankError("exit() in a cell would end the rank", "%ddl stop ends all of them")

    def ddl_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Answer a request on the control thread, whatever the main thread does."""
        content = dict(parent["content"])
        op = content.pop("op")
        try:
            reply = {"status": "ok", "result": self.requests[op](**content)}
        except Exception as error:  # noqa: BLE001 - the asker gets it; the control thread must live on
            reply = {"status": "error", "ename": type(error).__name__, "evalue": str(error)}
        self.session.send(stream, "ddl_reply", reply, parent=parent, ident=ident)

    def publish(self, kind: str, content: dict[str, Any], parent: dict[str, Any] | None = None) -> None:
        """Send a message of our own type on IOPub, from any thread; without a parent as part of the cell."""
        self.session.send(
            self.iopub_socket,
            kind,
            content,
            parent=self.cell_parent if parent is None else parent,
            ident=self._topic(kind),
        )


def this_kernel() -> RankKernel:
    """The kernel of this process. Raises RuntimeError outside an engine."""
    kernel = RankKernel.instance() if RankKernel.initialized() else None
    if not isinstance(kernel, RankKernel):
        raise RuntimeError("this process is not a rank's engine")  # noqa: TRY004 - it is about the process
    return kernel


def is_cell_file(filename: str) -> bool:
    """Whether code of this file name was typed in a cell."""
    return filename.startswith(get_tmp_directory())  # type: ignore[no-untyped-call]


def cell_name(filename: str) -> str:
    """`In[5]` for the file of a cell, any other file as it is."""
    if not is_cell_file(filename):
        return filename
    named = this_kernel().shell.compile.format_code_name(filename)
    return named[1] if named else filename


def threads_keep_their_cell() -> None:
    """What a thread prints belongs to the cell that started it, also when another runs by then.

    ipykernel 7 takes the cell from a context variable, which threads do not inherit before Python 3.14, and falls back
    to whatever cell came last; ipykernel 6 keeps a list of threads of its own, which this does not disturb.
    """
    start = threading.Thread.start

    def start_in_context(self: threading.Thread) -> None:
        if not _in_cell.get(False):  # the engine's own threads, such as the one that reads file descriptors 1 and 2
            start(self)
            return
        self.run = partial(contextvars.copy_context().run, self.run)  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_in_context  # type: ignore[method-assign]


def _import_early() -> None:
    """Import what `bootstrap` will need: torch, and what of ours stands on it."""
    from ddl_magics.rank import cell  # noqa: F401


def main() -> None:
    """Start the engine; torch is imported in the time that connecting takes."""
    from ddl_magics import lease

    lease.end_with_owner()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")  # torch's record of collectives, see rank.collectives
    # The C++ stacks with which torch tells of a closed connection would bury the error that it comes of.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    threading.Thread(target=_import_early, name="import torch", daemon=True).start()
    threads_keep_their_cell()
    app.Kernel = RankKernel
    try:
        app.main()
    except RuntimeError as error:
        if "Event loop stopped" not in str(error):
            raise
        # A signal asked it to end: under MPI that is how a rank goes when another one has died. No traceback of this
        # belongs below the user's cell; the code is the one that a shell gives for SIGTERM, and mpi4py hands it on.
        sys.exit(143)


if __name__ == "__main__":
    # `python -m` made this file `__main__`; the class that the rest of the package sees must be the same one.
    from ddl_magics.rank import engine  # noqa: PLW0406

    engine.main()
