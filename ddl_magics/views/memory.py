"""The memory bars before they are drawn: which rows, on what scale, in what unit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddl_magics.protocol import MEMORY_KINDS
from ddl_magics.views import format as fmt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.telemetry.snapshot import RankView

MAX_BARS = 16
"""With more ranks there are three bars: the least, the mean, the most."""
VISIBLE = 0.2
"""Below this share of the capacity the scale is that of the largest bar."""


@dataclass(frozen=True)
class MemoryRow:
    """One bar."""

    label: str
    kinds: dict[str, float]
    """Bytes by kind, in stacking order."""
    total: float
    peak: float


@dataclass(frozen=True)
class MemoryPicture:
    """The bars of a run and their common scale."""

    heading: str
    rows: tuple[MemoryRow, ...]
    scale: float
    """Bytes at the right end; 0 while nothing is known."""
    unit: fmt.Unit
    kinds: tuple[str, ...]
    """Those that the legend names."""
    note: str
    """What the scale is, where it is not the capacity, and who stands out."""


def memory_picture(ranks: Sequence[RankView]) -> MemoryPicture:
    """Bars of the ranks that have told their memory."""
    known = [r for r in ranks if r.total or r.peak_total]
    largest = max((max(r.total, r.peak_total) for r in known), default=0)
    capacity = max((r.capacity for r in known), default=0)
    on_capacity = capacity >= largest >= VISIBLE * capacity and capacity > 0
    scale = float(capacity) if on_capacity else nice_scale(largest)
    unit = fmt.byte_unit(scale)
    heading = f"Memory per rank, {unit.name}"
    if on_capacity:
        heading += f" of {unit.digits(capacity)}"
    notes = []
    if known and not on_capacity:
        notes.append(f"full bar: {fmt.size(scale)}" + (f" of {fmt.size(capacity)}" if capacity else ""))
    several = len(known) > MAX_BARS
    rows = _summary(known) if several else [_row(r, len({x.info.host for x in ranks}) > 1) for r in known]
    if several:
        top = max(known, key=lambda r: r.peak_total)
        notes.append(f"highest peak: rank {top.info.rank}, {fmt.size(top.peak_total)}")
    used = [k for k in MEMORY_KINDS if any(r.memory[k] or r.peak[k] for r in known)]
    return MemoryPicture(heading, tuple(rows), scale, unit, tuple(used), "; ".join(notes))


def nice_scale(largest: float) -> float:
    """The least of 1, 1.5, 2, 3, 4, 6, 8, 12, 16, ... bytes, kibibytes, ... that holds `largest`.

    Coarse, so that the bars do not change their scale with every record.
    """
    if largest <= 0:
        return 0.0
    power = 2.0 ** math.floor(math.log2(largest))
    return next(step * power for step in (1, 1.5, 2) if step * power >= largest)


def _row(rank: RankView, hosts: bool) -> MemoryRow:
    return MemoryRow(rank_label(rank, hosts=hosts), _floats(rank.memory), rank.total, rank.peak_total)


def rank_label(rank: RankView, *, hosts: bool) -> str:
    """`0 n1:0` (rank, host, GPU) over several hosts, `0 cuda:0` or `0 cpu` on one."""
    info = rank.info
    kind, _, index = info.device.partition(":")
    host = info.host.split(".")[0][:16]
    if not hosts:
        return f"{info.rank} {info.device}"
    return f"{info.rank} {host}:{index}" if kind != "cpu" and index else f"{info.rank} {host}"


def _summary(ranks: list[RankView]) -> list[MemoryRow]:
    least = min(ranks, key=lambda r: r.total)
    most = max(ranks, key=lambda r: r.total)
    n = len(ranks)
    mean = {kind: sum(r.memory[kind] for r in ranks) / n for kind in MEMORY_KINDS}
    middle = MemoryRow(f"mean of {n}", mean, sum(r.total for r in ranks) / n, sum(r.peak_total for r in ranks) / n)
    return [
        MemoryRow(f"least: rank {least.info.rank}", _floats(least.memory), least.total, least.peak_total),
        middle,
        MemoryRow(f"most: rank {most.info.rank}", _floats(most.memory), most.total, most.peak_total),
    ]


def _floats(memory: dict[str, int]) -> dict[str, float]:
    return {kind: float(value) for kind, value in memory.items()}
