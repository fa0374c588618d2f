"""Processes of ours: a family of them, and its end. Each is known by number and start time, and never by a name."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil

from ddl_magics.lease import Process


def family(pid: int) -> set[Process]:
    """A process with its children and theirs; empty when it is gone."""
    try:
        members = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return set()
    found = set()
    for member in members:
        with suppress(psutil.NoSuchProcess):
            found.add(Process(member.pid, member.create_time()))
    return found


def terminate(process: Process) -> None:
    """Ask a process to end, if it is still the same one."""
    if process.alive():
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)


def interrupt(processes: set[Process]) -> None:
    """Do to each what Ctrl-C does, if it is still the same one."""
    for process in processes:
        if process.alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)


def end(processes: set[Process], patience: float) -> list[int]:
    """See processes gone: wait `patience` seconds, then terminate, then kill; returns whom it killed."""
    killed = []
    for number, seconds in ((None, patience), (signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        for process in processes:
            if number and process.alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
                if number == signal.SIGKILL:
                    killed.append(process.pid)
        deadline = time.monotonic() + seconds
        while (some := any(process.alive() for process in processes)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not some:
            break
    return killed
