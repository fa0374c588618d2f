"""The processes of one `ddl-magics run`: started, waited for, and ended together, none of them left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

import psutil

from ddl_magics.cluster.processes import end, family, interrupt, terminate
from ddl_magics.lease import Process
from ddl_magics.protocol import JOB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

OF_SRUN = re.compile(rb"srun: error: .*task.*: Exited with exit code (\d+)")
"""In which words srun tells how the first rank failed; its own status is the highest, also of those it ended then."""

PATIENCE_S = 5.0
"""Seconds that ranks have to end by themselves once they were asked to, as by Ctrl-C."""


class Job:
    """One command that starts all ranks, or one a rank.

    Each is a process group of its own, so that the terminal's Ctrl-C comes to this process alone, which hands it on.

    Parameters
    ----------
    commands, environments
        Of each process to start.
    job
        Value of `protocol.JOB` in all of these environments: ranks of a launcher that was killed are known by it.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], job: str) -> None:
        self._commands = commands
        self._environments = environments
        self._job = job
        self._running: list[subprocess.Popen[bytes]] = []
        self._by_srun = commands[0][0].endswith("srun")
        self._told: list[int] = []
        """Exit statuses of ranks, as the launcher told them."""
        self._asked = 0
        """The signal by which this process was asked to end."""

    def run(self) -> int:
        """Start, wait and end all; returns the exit status of the first that failed, as a shell says it, or 0."""
        with self._signals_noted():
            try:
                for command, environment in zip(self._commands, self._environments, strict=True):
                    self._running.append(
                        subprocess.Popen(
                            command,
                            env=dict(environment),
                            stdin=subprocess.DEVNULL,
                            stderr=subprocess.PIPE if self._by_srun else None,
                            process_group=0,
                        )
                    )
                listener = threading.Thread(target=self._listen, args=(self._running[0].stderr,), daemon=True)
                listener.start()
                status = self._wait()
            finally:
                self._end()
            listener.join()
            return self._told[0] if self._told and not self._asked else status

    def _listen(self, stream: IO[bytes] | None) -> None:
        """Hand on what a launcher and its ranks say, and note how the first of them ended."""
        for line in stream or ():
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            found = OF_SRUN.search(line)
            if found:
                self._told.append(int(found[1]))

    def _wait(self) -> int:
        while not self._asked:
            codes = [process.poll() for process in self._running]
            failed = next((index for index, code in enumerate(codes) if code), None)
            if failed is not None:
                return self._failed(failed, codes[failed] or 0)
            if None not in codes:
                return 0
            time.sleep(0.02)
        self._hand_on()
        return 128 + self._asked

    def _failed(self, index: int, code: int) -> int:
        """Say which rank ended all; launchers say it themselves."""
        if len(self._running) > 1:
            how = f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with exit status {code}"
            print(f"ddl-magics: rank {index} ended {how}; the others are ended too", file=sys.stderr)  # noqa: T201 - a terminal's
        return 128 - code if code < 0 else code

    def _family(self) -> set[Process]:
        """Every process of this job on this machine."""
        found: set[Process] = set()
        for process in self._running:
            found |= family(process.pid)
        for one in psutil.process_iter(["pid", "create_time", "environ"]):
            if (one.info["environ"] or {}).get(JOB) == self._job:
                found.add(Process(one.info["pid"], one.info["create_time"]))
        return found

    def _hand_on(self) -> None:
        """Interrupt the ranks as Ctrl-C does, and give them time; a second Ctrl-C takes it away."""
        first = self._asked
        self._asked = 0
        number = signal.SIGINT if first == signal.SIGINT else signal.SIGTERM
        twice = self._by_srun  # the first only makes it say where its tasks are
        if number == signal.SIGINT and not self._by_srun:
            ranks = self._started_by_launcher()
            interrupt(ranks)  # an mpiexec that is interrupted kills its ranks before they know
            if ranks:
                self._wait_for_end()
        for _ in range(1 + twice):
            for process in self._running:
                if process.poll() is None:
                    process.send_signal(number)
            time.sleep(0.2 * twice)
        self._wait_for_end()
        self._asked = first

    def _started_by_launcher(self) -> set[Process]:
        """Ranks that a launcher started on this machine; none where they are processes of ours.

        They have the script's command line; so have a rank's own children that it forked, which are left to it.
        """
        launcher = self._running[0].pid
        if self._commands[0][0] == sys.executable:
            return set()
        of_script = {}
        with suppress(psutil.NoSuchProcess):
            for member in psutil.Process(launcher).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    line = tuple(member.cmdline())
                    if line[:1] == (sys.executable,) and line == tuple(self._commands[0][-len(line) :]):
                        of_script[member.pid] = (member.ppid(), Process(member.pid, member.create_time()))
        return {process for parent, process in of_script.values() if parent not in of_script}

    def _wait_for_end(self) -> None:
        """Give the processes time, until another signal comes."""
        deadline = time.monotonic() + PATIENCE_S
        while any(process.poll() is None for process in self._running) and not self._asked:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)

    def _end(self) -> None:
        """See every process gone: those that are left get SIGTERM, then SIGKILL."""
        for process in self._running:
            if process.poll() is None:
                process.terminate()
        left = self._family()
        for one in left:
            terminate(one)
        end(left, 2.0)
        for process in self._running:
            process.wait()

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        def note(number: int, _: FrameType | None) -> None:
            self._asked = number

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
