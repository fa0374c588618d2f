"""Memory of this process and its limits as the host counts them. Bytes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class _MallInfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later, mallinfo(3)."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )


@functools.cache
def _mallinfo2() -> Callable[[], _MallInfo2] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallInfo2
    return function


def allocated_by_malloc() -> int | None:
    """Bytes that this process has from malloc, which is where torch's CPU tensors live; None without glibc."""
    function = _mallinfo2()
    if function is None:
        return None
    info = function()
    return int(info.uordblks + info.hblkhd)


def trim() -> None:
    """Give the system back what was freed and malloc keeps; where there is no glibc, nothing."""
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is not None:
        function(0)


def peak_resident() -> int:
    """Highest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def control_group_limits() -> list[int]:
    """Limits that the scheduler or container laid on this process's memory, control groups of both versions."""
    own = Path("/proc/self/cgroup")
    limits = []
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = [folder / "memory.max" for folder in _upwards(Path("/sys/fs/cgroup"), path)]
        elif "memory" in controllers.split(","):
            files = [folder / "memory.limit_in_bytes" for folder in _upwards(Path("/sys/fs/cgroup/memory"), path)]
        else:
            continue
        texts = [file.read_text().strip() for file in files if file.exists()]
        limits += [int(text) for text in texts if text.isdigit()]
    return limits


def _upwards(root: Path, path: str) -> list[Path]:
    folder = root / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def reset_peak_resident() -> None:
    """Let `peak_resident` begin anew; only Linux can (proc(5), clear_refs), elsewhere it is the peak of a life."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
