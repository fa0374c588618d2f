"""What a rank computes on, behind one interface: a CPU or one CUDA device.

Nothing here starts CUDA by being asked about it, and nothing that the sampler's thread calls synchronises it. Memory
in bytes. Limits: one device a rank; other accelerators are not known.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import torch

from ddl_magics.errors import StartError, UsageOnRankError
from ddl_magics.rank import host
from ddl_magics.strategies.common import autocast

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

PRECISIONS = ("32", "bf16-mixed", "bf16-true")


def choose(local_rank: int, local_world_size: int, wanted: str = "auto") -> str:
    """Name a valid device for a rank: `cpu` or `cuda:I`.

    A task that sees one GPU uses that one: schedulers that bind a GPU to each task number it 0 in all of them.

    Raises
    ------
    StartError
        A GPU is wanted and there is none, or the ranks of this node see fewer GPUs than they are.
    """
    if wanted not in {"auto", "cpu", "cuda"}:
        raise StartError(f"There is no device {wanted!r}", "Valid: auto, cpu, cuda.")
    visible = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if visible == 0:
        if wanted == "cuda":
            raise StartError(
                "A GPU was asked for and torch sees none here", "Use --device cpu, or a CUDA build of torch."
            )
        return "cpu"
    if visible == 1:
        return "cuda:0"
    if local_world_size > visible:
        raise StartError(
            f"{local_world_size} ranks on this node see {visible} GPUs, and two ranks cannot share one under NCCL",
            f"Start {visible} ranks a node, or use --device cpu.",
        )
    return f"cuda:{local_rank}"


class Reading(Protocol):
    """A number that a device may still be computing."""

    def ready(self) -> bool:
        """Whether `value` can be read without waiting."""

    def value(self) -> float:
        """The number; only meaningful once `ready`."""


class Device(ABC):
    """One rank's device."""

    backend: str
    """Backends of the default process group, as torch names them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.torch = torch.device(name)

    @staticmethod
    def of(name: str) -> Device:
        """Return the device with that torch name."""
        return CPU() if name == "cpu" else CUDA(name)

    @abstractmethod
    def activate(self) -> None:
        """Make it the device of this process."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed torch's generators, this device's too."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes in use now: `total`, `capacity`, `allocated`, and what else the device can tell; from any thread."""

    def live(self) -> int | None:
        """Bytes that this process has allocated, cheaply; None where the device keeps peaks itself."""
        return None

    @abstractmethod
    def reset_peak(self) -> None:
        """Let the peaks of `memory` begin anew."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Bytes that there are."""

    @abstractmethod
    def free(self) -> int:
        """Bytes that could be allocated now; the ranks of a node share those of its host."""

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """What it can do: names of backends, `bf16`, and on CUDA its architecture, such as `sm_90`."""

    @abstractmethod
    def read(self, value: torch.Tensor) -> Reading:
        """Begin to read a 0-dim tensor, without waiting for it."""

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """What a forward in that precision runs under, as the strategies' own forward does."""
        self.require(precision)
        return autocast(self.name, precision)

    def require(self, precision: str) -> None:
        """Raise UsageOnRankError for a precision that does not exist or that this device lacks."""
        if precision not in PRECISIONS:
            raise UsageOnRankError(f"There is no precision {precision!r}", f"Valid: {', '.join(PRECISIONS)}.")
        if precision != "32" and "bf16" not in self.capabilities:
            raise UsageOnRankError(f"{self.name} cannot compute in bf16", "Use precision 32.")


class Number:
    """A number that is there already, as a Reading."""

    def __init__(self, value: float) -> None:
        self._value = value

    def ready(self) -> bool:
        return True

    def value(self) -> float:
        return self._value


class CPU(Device):
    """The host's processor and memory."""

    backend = "gloo"

    def __init__(self) -> None:
        super().__init__("cpu")
        self._process = psutil.Process()

    def activate(self) -> None:
        """Nothing to do."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def memory(self) -> dict[str, int]:
        """`total` is the resident memory of the process, `peak_total` its highest value, `allocated` glibc's count."""
        result = {"total": int(self._process.memory_info().rss), "capacity": self.capacity}
        result["peak_total"] = max(host.peak_resident(), result["total"])
        allocated = host.allocated_by_malloc()
        if allocated is not None:
            result["allocated"] = allocated
        return result

    def live(self) -> int | None:
        return host.allocated_by_malloc()

    def reset_peak(self) -> None:
        host.reset_peak_resident()

    @functools.cached_property
    def capacity(self) -> int:
        return min([int(psutil.virtual_memory().total), *host.control_group_limits()])

    def free(self) -> int:
        return min(int(psutil.virtual_memory().available), self.capacity - int(self._process.memory_info().rss))

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"gloo", "bf16"})

    def read(self, value: torch.Tensor) -> Reading:
        return Number(float(value))


class CUDA(Device):
    """One NVIDIA GPU."""

    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._slots: torch.Tensor | None = None
        self._free: list[int] = []

    def activate(self) -> None:
        torch.cuda.set_device(self.torch)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # also seeds every CUDA device, when CUDA starts if it has not started

    def memory(self) -> dict[str, int]:
        """`total` is what torch reserved, `device_used` what all processes hold on the GPU as the driver counts it."""
        result = {"capacity": self.capacity}
        driver = _nvml_memory(self._nvml)
        if driver is not None:
            result["device_used"] = driver[0]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            stats = torch.cuda.memory_stats(self.torch)
            result["allocated"] = stats.get("allocated_bytes.all.current", 0)
            result["reserved"] = stats.get("reserved_bytes.all.current", 0)
            result["peak_allocated"] = stats.get("allocated_bytes.all.peak", 0)
            result["peak_reserved"] = stats.get("reserved_bytes.all.peak", 0)
        result["total"] = result.get("reserved", 0)
        result["peak_total"] = result.get("peak_reserved", 0)
        return result

    def reset_peak(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(self.torch)

    @functools.cached_property
    def capacity(self) -> int:
        driver = _nvml_memory(self._nvml)
        if driver is not None:
            return driver[1]
        return int(torch.cuda.get_device_properties(self.torch).total_memory)

    def free(self) -> int:
        of_driver, _ = torch.cuda.mem_get_info(self.torch)
        kept = torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)
        return int(of_driver) + kept

    @property
    def capabilities(self) -> frozenset[str]:
        major, minor = torch.cuda.get_device_capability(self.torch)
        return frozenset({"gloo", "nccl", f"sm_{major}{minor}"} | ({"bf16"} if major >= 8 else set()))

    @functools.cached_property
    def _nvml(self) -> Any:
        """NVML's handle of this GPU, None where NVML cannot be used. NVML creates no CUDA context."""
        import pynvml

        try:
            pynvml.nvmlInit()
            visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
            entry = visible[self.torch.index] if visible else str(self.torch.index)
            if entry.isdigit():
                return pynvml.nvmlDeviceGetHandleByIndex(int(entry))
            return pynvml.nvmlDeviceGetHandleByUUID(entry)
        except (pynvml.NVMLError, IndexError):
            return None

    def read(self, value: torch.Tensor) -> Reading:
        """Copy into pinned memory on the current stream; an event tells when the copy is there."""
        if value.device.type == "cpu":
            return Number(float(value))
        if self._slots is None:
            # Pinned once: pinning memory for each loss could wait for the device.
            self._slots = torch.empty(SLOTS, dtype=torch.float64, pin_memory=True)
            self._free = list(range(SLOTS))
        if not self._free:
            return Number(float("nan"))
        index = self._free.pop()
        slot = self._slots[index]
        slot.copy_(value.to(torch.float64), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Copied(slot, event, functools.partial(self._free.append, index))


SLOTS = 4096
"""Losses of one CUDA rank that may be on their way at a time; one more reads as nan."""


class _Copied:
    def __init__(self, slot: torch.Tensor, event: torch.cuda.Event, done: Callable[[], None]) -> None:
        self._slot, self._event, self._done = slot, event, done

    def ready(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def value(self) -> float:
        return float(self._slot)

    def __del__(self) -> None:
        # A reading dropped on its way frees its slot too: the next copy into it comes later on the same stream.
        self._done()


def _nvml_memory(handle: Any) -> tuple[int, int] | None:
    """Bytes used and bytes there are, of all processes on the GPU."""
    if handle is None:
        return None
    import pynvml

    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        return None
    return int(info.used), int(info.total)
