"""How a rank's process ended: signal, exit code or MPI_Abort, and what usually does that.

Who knows: for plain processes the launcher that started them; under MPI only its launcher, in its own words (Open MPI
4 and 5, MPICH and its relatives). The notebook is no parent of the ranks, so that the system does not tell it.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddl_magics.cluster.cluster import Cluster

FAULT = "a fault in C or C++ code"
CAUSES = {
    signal.SIGKILL: "somebody or the system killed it",
    signal.SIGTERM: "somebody or the batch system asked it to end",
    signal.SIGSEGV: FAULT,
    signal.SIGBUS: f"{FAULT}, or shared memory is full",
    signal.SIGILL: f"{FAULT}, or one built for another processor",
    signal.SIGFPE: FAULT,
    signal.SIGABRT: "C or C++ code gave up, as gloo does when ranks bring tensors of different sizes",
    signal.SIGXCPU: "its time on the processor was used up",
    signal.SIGHUP: "the terminal or login that it belonged to was closed",
}


@dataclass(frozen=True)
class Ending:
    """How one process ended. One of `signal`, `code` and `abort` is given."""

    rank: int | None = None
    """None where the launcher does not say whose end it was."""
    signal: int | None = None
    code: int | None = None
    abort: int | None = None
    """The code that MPI_Abort was called with."""

    def in_words(self, memory: str = "") -> str:
        """Say it, with the likely cause. `memory`: evidence that the system lacked memory, empty without."""
        if self.signal is not None:
            known = self.signal in list(signal.Signals)
            name = signal.strsignal(self.signal) if known else "unknown"
            cause = CAUSES.get(signal.Signals(self.signal)) if known else None
            if self.signal == signal.SIGKILL and memory:
                cause = f"the system killed it for lack of memory, {memory}"
            return f"signal {self.signal} {name}" + (f": {cause}" if cause else "")
        if self.abort is not None:
            return f"MPI_Abort with code {self.abort}, by its own code or a library"
        return f"exit code {self.code}: os._exit or sys.exit, by its own code or a library"


def of_exit_code(code: int, rank: int | None = None) -> Ending:
    """What a parent was told: a negative code is a signal."""
    return Ending(rank, signal=-int(code)) if code < 0 else Ending(rank, code=code)


WORDS: tuple[tuple[str, str], ...] = (
    (r"MPI_ABORT was invoked on rank (?P<rank>\d+).*?Errorcode: (?P<abort>-?\d+)", "Open MPI"),
    (r"application called MPI_Abort\([^,]*, (?P<abort>-?\d+)\) - process (?P<rank>\d+)", "MPICH"),
    (r"process rank (?P<rank>\d+) with PID \d+ on node \S+\s+exited on\s+signal (?P<signal>\d+)", "Open MPI"),
    (r"Process name:\s*\[\S*?(?P<rank>\d+)\]\s*Exit code:\s*(?P<code>\d+)", "Open MPI"),
    (r"EXIT STRING: [^(\n]*\(signal (?P<signal>\d+)\)", "MPICH"),
    (r"(?:killed by|terminated by|exited on)\s+signal (?P<signal>\d+)", "others"),
    (r"EXIT CODE: (?P<code>\d+)", "MPICH"),
    (r"process rank (?P<rank>\d+) with PID \d+ on node \S+\s+exiting\s+improperly", "Open MPI, code 0"),
)
"""(what a launcher prints of the first process that ended, whose launcher); the first that is found is taken."""


def in_launchers_words(printed: str) -> Ending | None:
    """How the first rank ended, by what an MPI launcher printed; None where it says nothing of it."""
    for pattern, _ in WORDS:
        found = re.search(pattern, printed, re.DOTALL)
        if found:
            ending = Ending(**{name: int(number) for name, number in found.groupdict().items()})
            return _asked_to_end(ending, printed[: found.start()])
    return None


def _asked_to_end(ending: Ending, before: str) -> Ending:
    """A rank that gets SIGTERM says so, and mpi4py then aborts the job for it: the signal is the cause."""
    if ending.signal is None and ending.abort is None and ending.code is None:
        return replace(ending, code=0)
    engine = rf"\[IPEngine\.(?:\d+\.)?{ending.rank}\] CRITICAL \| received signal (\d+)"
    asked = re.search(engine, before) if ending.abort is not None else None
    return Ending(ending.rank, signal=int(asked.group(1))) if asked else ending


def find(cluster: Cluster, dead: list[int]) -> Ending | None:
    """How the first rank of a cluster ended, as far as is known yet."""
    told: dict[str, Any] = getattr(cluster.ipp.engine_set, "stop_data", None) or {}
    codes = {data["pid"]: data["exit_code"] for data in told.get("engines", {}).values() if "exit_code" in data}
    for rank in dead:
        code = codes.get(cluster.facts[rank]["pid"])
        if code is not None:
            return of_exit_code(code, rank)
    said = in_launchers_words(cluster.printed()) if cluster.mpi else None
    code = told.get("exit_code") or 0
    return said or (Ending(signal=code - 128) if cluster.mpi and dead and code > 128 else None)  # as a shell says it
