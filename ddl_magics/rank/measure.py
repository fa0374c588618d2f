"""How much memory a rank uses, by kind: now, and at the peak of a cell. Bytes.

The kinds come from the prepared models that live, looked at by the thread that trains (`strategies.looks`); the rest
comes from the device. A GPU counts the peak of the total itself and misses nothing. On a CPU the total is what the
process has allocated beyond what it had, models aside, when the cell began: not Python and its libraries, which would
hide a small model. Its peak is what was seen at each `backward`, when all activations are there, and at each step.
Called from the sampler's thread too: nothing here is a collective or touches a GPU.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddl_magics.rank.device import Device
    from ddl_magics.rank.training import Training
    from ddl_magics.strategies.base import Prepared

KINDS = ("parameters", "gradients", "optimizer")
"""What a strategy tells of its models; the rest of `protocol.MEMORY_KINDS` is the device's."""


class Memory:
    """Memory of one rank."""

    def __init__(self, hardware: Device) -> None:
        self._hardware = hardware
        self._lock = threading.Lock()
        self._models: list[weakref.ref[Training]] = []
        self._peak = dict.fromkeys(KINDS, 0)
        """Of this cell, models that are gone by now included."""
        self._base = 0
        """On a CPU: bytes allocated when the cell began, models aside."""
        self._peak_live = 0

    def add(self, training: Training) -> None:
        """Count a model in as long as it lives."""
        with self._lock:
            self._models = [known for known in self._models if known() is not None] + [weakref.ref(training)]

    def begin(self) -> None:
        """Let peaks begin anew, with a cell."""
        for prepared in self._live():
            prepared.looks.forget_peak()
        live = self._hardware.live()
        if live is None:
            self._hardware.reset_peak()
        base = 0 if live is None else max(live - sum(self._kinds().values()), 0)
        with self._lock:  # the sampler's thread must never see the new peak beside the old base
            self._peak = dict.fromkeys(KINDS, 0)
            self._base = self._peak_live = base

    def now(self) -> dict[str, int]:
        """Bytes by kind, with `total` and `capacity`; on a CPU also `resident`, the whole process."""
        kinds = self._kinds()
        device = self._hardware.memory()
        rest = {"capacity": device["capacity"]}
        if (live := self._hardware.live()) is None:
            return _with_rest(kinds, device, "") | rest
        return _beyond(kinds, live - self._base) | rest | {"resident": device["total"]}

    def notice(self) -> None:
        """Take note of what is allocated at a moment when that may be the peak; costs microseconds."""
        self._note_peak()
        live = self._hardware.live()
        if live is not None:
            with self._lock:
                self._peak_live = max(live, self._peak_live)

    def peak(self) -> dict[str, int]:
        """Bytes by kind: the highest that each of a model's kinds was seen at, and the highest `total`."""
        self.notice()
        with self._lock:
            kinds, beyond = self._peak, self._peak_live - self._base
        if self._hardware.live() is None:
            return _with_rest(kinds, self._hardware.memory(), "peak_")
        return _beyond(kinds, beyond)

    def _live(self) -> list[Prepared]:
        with self._lock:
            models = [known() for known in self._models]
        return [training.prepared for training in models if training is not None and not training.closed]

    def _kinds(self) -> dict[str, int]:
        return _sum(prepared.memory() for prepared in self._live())

    def _note_peak(self) -> None:
        peaks = _sum(prepared.looks.peak() for prepared in self._live())
        with self._lock:
            self._peak = {kind: max(size, self._peak[kind]) for kind, size in peaks.items()}


def _sum(seen: Iterable[dict[str, int]]) -> dict[str, int]:
    kinds = dict.fromkeys(KINDS, 0)
    for of_one in seen:
        for kind in KINDS:
            kinds[kind] += of_one.get(kind, 0)
    return kinds


def _with_rest(kinds: dict[str, int], device: dict[str, int], prefix: str) -> dict[str, int]:
    """Add `other`, `reserved` and `total`: on a GPU torch tells allocated from reserved, elsewhere all is resident."""
    total = device[f"{prefix}total"]
    used = device.get(f"{prefix}allocated", total) if f"{prefix}reserved" in device else total
    return kinds | {"other": max(used - sum(kinds.values()), 0), "reserved": total - used, "total": total}


def _beyond(kinds: dict[str, int], live: int) -> dict[str, int]:
    """Add `other`, `reserved` and `total` by what is allocated beyond the base."""
    total = max(live, sum(kinds.values()))
    return kinds | {"other": total - sum(kinds.values()), "reserved": 0, "total": total}
