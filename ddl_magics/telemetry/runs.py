"""The finished runs of a session, and the figures by which they compare."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING

from ddl_magics.protocol import MEMORY_KINDS

if TYPE_CHECKING:
    from ddl_magics.telemetry.history import History
    from ddl_magics.telemetry.snapshot import RunView

MAX_RUNS = 200
"""Of a session; the oldest go first."""
SEVERITY = ("dead", "error", "interrupted", "released", "ok")
"""Outcomes, worst first: a run ended as its worst rank did."""


@dataclass(frozen=True)
class RunRow:
    """One run in the comparison. NaN and None: the run does not tell."""

    run: str
    name: str
    strategy: str
    world_size: int
    metric: str
    """The metric behind `first`, `last` and `best`: `loss` where there is one."""
    first: float
    """Mean over the ranks at the first step."""
    last: float
    last_step: int
    best: float
    wild: int
    """NaN and infinities among the values of that metric."""
    peak: dict[str, int]
    """Bytes by kind at the peak of the rank whose peak is the highest."""
    peak_total: int
    peak_rank: int | None
    peak_by_rank: dict[int, int] = field(default_factory=dict)
    """Peak bytes of each rank."""
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    seconds_per_step: float | None = None
    seconds: float = 0.0
    outcome: str = "ok"
    memory_ratio: float | None = None
    """Peak memory of a rank over that of the first run in the comparison."""
    speedup: float | None = None
    """Tokens a second (or else steps a second) over those of the first run."""


class Runs:
    """The runs of a session in the order in which they ended. One writer, any reader."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._runs: dict[str, History] = {}

    def add(self, history: History) -> None:
        with self._lock:
            self._runs[history.info.run] = history
            while len(self._runs) > MAX_RUNS:
                del self._runs[next(iter(self._runs))]

    def __len__(self) -> int:
        return len(self._runs)

    def histories(self) -> list[History]:
        with self._lock:
            return list(self._runs.values())

    def get(self, key: str) -> History | None:
        """By identifier, or else the latest of that name, or else of that strategy."""
        runs = self.histories()
        by_id = {h.info.run: h for h in runs}
        by_strategy = {h.info.strategy: h for h in runs}
        by_name = {h.info.name: h for h in runs}
        return by_id.get(key) or by_name.get(key) or by_strategy.get(key)

    def rows(self, ids: list[str] | None = None) -> list[RunRow]:
        """One row a run, those of `ids` in that order, or all; ratios are to the first row."""
        with self._lock:
            chosen = list(self._runs.values()) if ids is None else [self._runs[i] for i in ids if i in self._runs]
        rows = [row_of(history.view()) for history in chosen]
        return [_with_ratios(row, rows[0]) for row in rows]


def row_of(view: RunView) -> RunRow:
    """The figures of one run, without ratios."""
    curve = view.loss
    measured = [r for r in view.ranks if r.peak_total > 0]
    top = max(measured, key=lambda r: r.peak_total, default=None)
    statuses = [r.outcome.status for r in view.ranks if r.outcome is not None]
    return RunRow(
        run=view.info.run,
        name=view.info.name,
        strategy=view.info.strategy,
        world_size=view.info.world_size,
        metric=curve.name if curve else "",
        first=curve.first if curve else math.nan,
        last=curve.last if curve else math.nan,
        last_step=curve.last_step if curve else 0,
        best=curve.best if curve else math.nan,
        wild=curve.wild if curve else 0,
        peak=top.peak if top else dict.fromkeys(MEMORY_KINDS, 0),
        peak_total=top.peak_total if top else 0,
        peak_rank=top.info.rank if top else None,
        peak_by_rank={r.info.rank: r.peak_total for r in measured},
        tokens_per_second=view.progress.tokens_per_second,
        samples_per_second=view.progress.samples_per_second,
        seconds_per_step=view.progress.seconds_per_step,
        seconds=view.progress.elapsed,
        outcome=next((s for s in SEVERITY if s in statuses), "ok") if view.finished else "running",
    )


def _with_ratios(row: RunRow, first: RunRow) -> RunRow:
    memory = row.peak_total / first.peak_total if row.peak_total and first.peak_total else None
    speedup = None
    if row.tokens_per_second and first.tokens_per_second:
        speedup = row.tokens_per_second / first.tokens_per_second
    elif row.seconds_per_step and first.seconds_per_step:
        # The global batch is the same in every run of a comparison, so steps compare as samples do.
        speedup = first.seconds_per_step / row.seconds_per_step
    return replace(row, memory_ratio=memory, speedup=speedup)
