"""Frees this rank from whatever holds it: a collective whose peers do not come, a wait for the store, plain Python.

Everything here is called on the control thread, while the main thread may be blocked in C++. What is freed raises; the
process groups are then unusable, and `bootstrap.recover` makes them anew before the next cell.
Limits: a main thread in C code that is no collective of torch's (a long matrix product, MPI, a system call that is not
interrupted) goes on until it returns to Python.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

from ddl_magics.rank import collectives, group, pairs

if TYPE_CHECKING:
    from ddl_magics.protocol import Waiting
    from ddl_magics.rank.whereabouts import Whereabouts

ABORT_S = 5.0
"""Seconds that NCCL has to abort its communicators; hangs are on record (pytorch#119215)."""

CLOSED = ("gloo/transport/tcp", "DistNetworkError", "NCCL communicator was aborted", "ProcessGroupNCCL")
"""What the messages of errors say that come of a closed connection, not of the program."""


class Rescue:
    """The ways to free one rank."""

    def __init__(self, whereabouts: Whereabouts) -> None:
        self._whereabouts = whereabouts
        self.run = ""
        """The cell that runs."""
        self.reason = ""
        """Why this rank was freed in the present cell; empty: it was not."""
        self.waiting: Waiting | None = None
        """What it waited in then."""
        self.broken = False
        """Connections were closed since the process groups were made."""
        self._at_work = threading.Lock()
        """Held while connections are closed: a cell does not end meanwhile, or the next groups' would be closed too."""

    def begin(self, run: str) -> None:
        """A cell begins."""
        self.run, self.reason, self.waiting = run, "", None

    def end(self) -> None:
        """The cell has ended, once a request to free it that is under way is met: a later one comes too late."""
        with self._at_work:
            self.run = ""

    def release(self, reason: str, run: str = "") -> dict[str, Any]:
        """Close every collective of this rank, so that it fails at once here and on its peers.

        `run`: the cell that is meant; without one whatever the main thread does.
        """
        with self._at_work:
            if run and run != self.run:
                return {"shut": 0, "aborted": False}
            place = self._whereabouts.look()
            if not self.reason:
                self.reason, self.waiting = reason or "another rank failed", place.waiting
            self.broken = True
            shut = pairs.shut()
            if place.waiting is None or place.waiting.name in collectives.RENDEZVOUS:
                group.free_from_store()
            return {"shut": shut, "aborted": abort_nccl()}

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the main thread; it is raised when that is back in Python."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def closed_connection(error: BaseException | None) -> BaseException | None:
    """The error of a collective whose connection was closed: this one, or what it was raised from. None: neither."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, RuntimeError) and any(sign in text for sign in CLOSED) and "Timed out" not in text:
            return error
        error = error.__cause__ or error.__context__
    return None


def abort_nccl() -> bool:
    """Abort NCCL's communicators; False where there are none. Gives up after ABORT_S, the caller offers a restart."""
    if not torch.cuda.is_available():
        return False
    backends = []
    for process_group in list(c10d._world.pg_map):
        try:
            backend = process_group._get_backend(torch.device("cuda"))
        except RuntimeError:  # a group for CPU tensors only
            continue
        if hasattr(backend, "abort"):
            backends.append(backend)
    threads = [threading.Thread(target=backend.abort, name="ddl abort", daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ABORT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return bool(threads) and not any(thread.is_alive() for thread in threads)
