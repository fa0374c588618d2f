"""A process that ends itself when the notebook's kernel is gone.

Ranks and controller must not outlive a kernel that was killed, and nobody is left to end them. Each watches the
kernel by process number and start time, so that a kernel that is merely busy, for however long, never loses its
ranks, and a new process that got the old number is not taken for it. On this host only: elsewhere the number means
nothing. Used on both sides; imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Process:
    """A process that stays the same one: a number is reused, a number with a start time is not."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this number now. Raises psutil.NoSuchProcess."""
        return cls(pid, psutil.Process(pid).create_time())

    def alive(self) -> bool:
        """Whether it runs still; a zombie does not."""
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.created) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


OWNER = "DDL_MAGICS_OWNER"
"""Environment variable: `[pid, start time]` of the kernel as JSON."""

PERIOD = 2.0
GRACE = 5.0
"""Seconds that the regular way has: first a kernel that stops, to end its ranks itself; then this process, to end."""


def owner_variable(owner: Process) -> dict[str, str]:
    """Environment that binds a process to its owner."""
    return {OWNER: json.dumps([owner.pid, owner.created])}


def end_with_owner() -> None:
    """Start the watch, in a thread; without an owner in the environment there is nothing to watch."""
    if OWNER in os.environ:
        owner = Process(*json.loads(os.environ[OWNER]))
        threading.Thread(target=_watch, args=(owner,), name="ddl lease", daemon=True).start()


def _watch(owner: Process) -> None:
    while owner.alive():
        time.sleep(PERIOD)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    # The orderly exit waits for a main thread that hangs: end what it would have ended, then this process.
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)
