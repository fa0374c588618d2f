"""Evidence that the system ended a process of a cluster for lack of memory.

Linux says so in two places: the control group's `memory.events` (version 2) or `memory.oom_control` (version 1) counts
such kills, and the kernel's log names the process. Both are read where they may be; without evidence nothing is
claimed. Of this host only.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
KERNEL_LOG = Path("/dev/kmsg")
READINGS = 10
"""Earlier readings that are kept; a count that rose since the oldest of them is of this death."""


class OutOfMemory:
    """Watches the control groups of processes.

    Parameters
    ----------
    pids
        Of the processes, while they live.
    """

    def __init__(self, pids: list[int]) -> None:
        self._files = {file for pid in pids for file in counter_files(_text(Path(f"/proc/{pid}/cgroup")))}
        self._readings: deque[dict[Path, int]] = deque(maxlen=READINGS)
        self._began = time.monotonic()
        self.note()

    def note(self) -> None:
        """Read the counts, to be called now and then."""
        self._readings.append({file: kills(_text(file)) for file in self._files})

    def evidence(self, pid: int) -> str:
        """What says that the process was ended for lack of memory; empty where nothing does."""
        if any(kills(_text(file)) > count for file, count in self._readings[0].items()):
            return "as its control group counts"
        return "as the kernel's log says" if pid in killed_in(kernel_log(), self._began) else ""


def counter_files(membership: str) -> list[Path]:
    """Where kills are counted, by the content of `/proc/PID/cgroup`."""
    found = []
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            found.append(CGROUPS / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return [file for file in found if file.is_file()]


def kills(text: str) -> int:
    """The count in such a file; 0 where it has none."""
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found.group(1)) if found else 0


def killed_in(log: str, since: float) -> set[int]:
    """Processes that the kernel ended for lack of memory after `since` seconds of the monotonic clock."""
    records = re.findall(r"^\d+,\d+,(\d+),[^;\n]*;.*?[Kk]illed process (\d+)", log, re.MULTILINE)
    return {int(pid) for microseconds, pid in records if int(microseconds) / 1e6 >= since}


def kernel_log() -> str:
    """The kernel's log as `/dev/kmsg` gives it, where it may be read."""
    records = []
    with suppress(OSError):
        descriptor = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with suppress(BlockingIOError):  # the end
                while record := os.read(descriptor, 8192):
                    records.append(record.decode("utf-8", "replace"))
        finally:
            os.close(descriptor)
    return "".join(records)


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text()
    return ""
