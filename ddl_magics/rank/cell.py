"""Runs one `%%ddl` cell on this rank, in its own IPython namespace, and tells how it ended."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import DDLError
from ddl_magics.protocol import CellRequest, Outcome, Status, Waiting
from ddl_magics.rank import collectives, group
from ddl_magics.rank.breakpoints import Breakpoints
from ddl_magics.rank.engine import RankKernel, cell_name, is_cell_file
from ddl_magics.rank.postmortem import PostMortem
from ddl_magics.rank.rescue import Rescue, closed_connection
from ddl_magics.rank.signals import undisturbed
from ddl_magics.rank.world import world_of_one

if TYPE_CHECKING:
    from ddl_magics.rank.context import Context
    from ddl_magics.rank.sampler import Sampler

Execute = Callable[[], Awaitable[dict[str, Any]]]
"""Runs the cell's code as IPython does; returns the content of an `execute_reply`."""


class Runner:
    """Runs cells, one at a time."""

    def __init__(self, kernel: RankKernel, context: Context, sampler: Sampler, rescue: Rescue) -> None:
        self.kernel = kernel
        self.context = context
        self.sampler = sampler
        self.rescue = rescue
        self.breakpoints = Breakpoints(kernel, sampler)
        self.post_mortem = PostMortem(partial(drop_last_error, kernel.shell))
        self._comparison: tuple[int, dict[str, Any]] = (0, {})
        """Number of the cell that compares strategies, and the variables before its first run."""

    async def run(self, request: CellRequest, execute: Execute) -> dict[str, Any]:
        """Run a cell under its strategy; the outcome is published before the reply that is returned."""
        started = time.monotonic()
        self.forget_failure()
        self.rescue.begin(request.run)
        self._set_variables(request)
        self.kernel.shell.execution_count = request.cell
        self.sampler.begin(request)
        try:
            self.context.begin_cell(request)
            self._set_names()
            with self._world(request), self.breakpoints.served():
                reply = await execute()
        except (DDLError, KeyboardInterrupt) as error:  # before the cell's first line
            reply = self._refused(error, [f"{type(error).__name__}: {error}"])
        except Exception as error:  # noqa: BLE001 - of a library, and it must be seen
            reply = self._refused(error, traceback.format_exception(error))
        with undisturbed():
            self._ended(request, reply, time.monotonic() - started)
            return reply

    def _ended(self, request: CellRequest, reply: dict[str, Any], seconds: float) -> None:
        """Tell how the cell ended."""
        self.context.end_cell()
        self.rescue.end()
        outcome = self._outcome(reply, seconds)
        self.post_mortem.ended(outcome, keep_frames=request.keep_frames)
        last = self.sampler.end()
        self.kernel.publish("ddl_outcome", {"outcome": outcome.to_wire(), "sample": last.to_wire()})

    def forget_failure(self) -> None:
        """Let go of the frames of a failed cell, and of the tensors in them."""
        self.post_mortem.forget()

    def _set_names(self) -> None:
        names = {name: getattr(self.context, name) for name in ("rank", "world_size", "local_rank", "device")}
        self.kernel.shell.user_ns.update(names, ddl=self.context)

    def _set_variables(self, request: CellRequest) -> None:
        """Every run of a comparison starts with the same variables; models of the run before are dropped by that."""
        if self._comparison[0] != request.cell:
            self.forget_comparison()
        if request.parts == 1:
            return
        namespace = self.kernel.shell.user_ns
        last = request.part == request.parts - 1
        if self._comparison[0] == request.cell:
            namespace.clear()
            namespace.update(self._comparison[1])
            self.context.forget_dropped_models()
        elif not last:
            self._comparison = request.cell, dict(namespace)
        if last:
            self.forget_comparison()

    def forget_comparison(self) -> None:
        """Let go of the variables from before a comparison; not every rank takes part in its last run."""
        self._comparison = (0, {})

    def _world(self, request: CellRequest) -> AbstractContextManager[Any]:
        """`single` is one process, also for code that talks to torch.distributed itself."""
        return world_of_one() if request.strategy == "single" else nullcontext()

    def _refused(self, error: BaseException, lines: list[str]) -> dict[str, Any]:
        """The reply of a cell that could not begin."""
        content = {"ename": type(error).__name__, "evalue": str(error), "traceback": lines}
        self.kernel.publish("error", content)
        return {"status": "error", "execution_count": self.kernel.shell.execution_count, **content}

    def _outcome(self, reply: dict[str, Any], seconds: float) -> Outcome:
        counts = group.counts()
        if reply["status"] == "ok":
            return Outcome(self.sampler.rank, "ok", seconds, groups=counts, broken=self.rescue.broken)
        error = getattr(sys, "last_value", None)
        status, waiting = self._status(reply, error), self.rescue.waiting
        if status == "released":
            error = closed_connection(error)  # where it waited, whatever the cell made of that error
            waiting = waiting or Waiting(collectives.name_in(error.__traceback__ if error else None))
        line, of = place_of(error)
        return Outcome(
            rank=self.sampler.rank,
            status=status,
            seconds=seconds,
            ename=reply.get("ename", ""),
            evalue=reply.get("evalue", ""),
            traceback=tuple(reply.get("traceback", ())),
            line=line,
            of=of,
            failed_at=time.time(),
            waiting=waiting if status == "released" else None,
            before=met_before(error) if status != "error" else "",
            groups=counts,
            memory=self.context.memory(),
            broken=self.rescue.broken or status == "released",
            unsettled=self.context.unsettled(),
        )

    @staticmethod
    def _status(reply: dict[str, Any], error: BaseException | None) -> Status:
        if reply.get("ename") in {"KeyboardInterrupt", "CancelledError"}:  # the latter in a cell that awaits
            return "interrupted"
        return "released" if closed_connection(error) else "error"


def drop_last_error(shell: Any) -> None:
    """Forget the last exception: its traceback holds the frames of a failed cell, and they hold its tensors."""
    if getattr(sys, "last_value", None) is None:
        return
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.InteractiveTB.tb = shell.last_execution_result = None
    gc.collect()  # an exception and its frames refer to one another


def place_of(error: BaseException | None) -> tuple[int | None, str]:
    """Line of the user's code where an error came from: of the innermost frame of a cell, or where it does not parse.

    With the name of the cell, where that is an earlier one.
    """
    if isinstance(error, SyntaxError):
        return error.lineno, ""
    frames = traceback.walk_tb(getattr(error, "__traceback__", None))
    places = [(frame.f_code.co_filename, line) for frame, line in frames if is_cell_file(frame.f_code.co_filename)]
    if not places:
        return None, ""
    (present, _), (file, line) = places[0], places[-1]
    return line, "" if file == present else cell_name(file)


def met_before(error: BaseException | None) -> str:
    """The first error of a chain, in words, where it is of the program: a `finally` or `except` ran when it was cut."""
    first = error
    while first is not None and first.__context__ is not None:
        first = first.__context__
    if first is None or first is error or isinstance(first, KeyboardInterrupt) or closed_connection(first):
        return ""
    line, of = place_of(first)
    said = next(iter(str(first).splitlines()), "")
    place = f" in line {line} of {of or 'the cell'}" if line else ""
    return f"{type(first).__name__}{f': {said[:200]}' if said else ''}{place}"
