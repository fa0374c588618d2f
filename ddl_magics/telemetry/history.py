"""What the ranks sent during one run, as the views need it.

One thread adds samples, another reads: every public method takes the lock, and what a reader gets is frozen. Memory is
bounded whatever the length of the run, the number of metrics and the number of lost records. Times are Unix seconds of
the notebook's clock; the ranks' own clocks are used nowhere, because those of other nodes may be wrong.
"""

from __future__ import annotations

import time
from statistics import median
from threading import Lock
from typing import TYPE_CHECKING

from ddl_magics.protocol import MEMORY_KINDS
from ddl_magics.telemetry.series import Series
from ddl_magics.telemetry.snapshot import RankInfo, RankView, RunInfo, RunProgress, RunView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddl_magics.protocol import Outcome, Progress, Sample
    from ddl_magics.telemetry.series import CurvePoint

__all__ = ["History", "RankInfo", "RunInfo"]

MAX_METRICS = 64
MAX_NOTES = 100
MAX_MISSING = 10_000


class _Rank:
    """What is kept of one rank."""

    def __init__(self, info: RankInfo) -> None:
        self.info = info
        self.sample: Sample | None = None
        self.before: Sample | None = None
        """The last record before its cell ended, or before it was freed from a collective."""
        self.progress: Progress | None = None
        self.peak: dict[str, int] = {}
        self.outcome: Outcome | None = None
        self.seq: int | None = None
        self.missing: set[int] = set()
        self.lost = 0
        self.last = False
        self.changed = 0.0
        """When the rank came to the state and line of its latest record, or began to wait in its collective."""

    def accept(self, seq: int) -> str:
        """`new`, `late` (one that counted as lost) or `again`. Counts the records that were skipped."""
        if self.seq is None or seq > self.seq:
            skipped = range(self.seq + 1, seq) if self.seq is not None else range(0)
            self.missing.update(skipped[: max(0, MAX_MISSING - len(self.missing))])
            self.lost += len(skipped)
            self.seq = seq
            return "new"
        if seq in self.missing:
            self.missing.discard(seq)
            self.lost -= 1
            return "late"
        return "again"


class History:
    """The records of one run.

    Parameters
    ----------
    info
        The run.
    ranks
        The ranks that take part in it.
    """

    def __init__(self, info: RunInfo, ranks: Iterable[RankInfo]) -> None:
        self.info = info
        self._lock = Lock()
        self._ranks = {r.rank: _Rank(r) for r in sorted(ranks, key=lambda r: r.rank)}
        self._series: dict[str, Series] = {}
        self._notes: dict[str, None] = {}
        self._ended: float | None = None

    def add(self, sample: Sample, now: float | None = None) -> bool:
        """Take in one record; False if it is of another run or rank, or came before."""
        now = time.time() if now is None else now
        with self._lock:
            rank = self._ranks.get(sample.rank)
            if rank is None or sample.run != self.info.run:
                return False
            arrival = rank.accept(sample.seq)
            if arrival == "again":
                return False
            for point in sample.points:
                series = self._metric(point.name)
                if series is not None:
                    series.add(sample.rank, point, now)
            for note in sample.notes:
                self._note(note)
            rank.last = rank.last or sample.last
            for candidate in (sample.peak, sample.memory):
                rank.peak = _higher(rank.peak, candidate)
            if arrival == "new":
                self._replace(rank, sample, now)
            return True

    def note(self, text: str) -> None:
        """A sentence of the notebook's own, shown once with those of the ranks."""
        with self._lock:
            self._note(text)

    def finish(self, outcomes: Sequence[Outcome], now: float | None = None) -> None:
        """The cell has ended. Records that come later are still taken in."""
        with self._lock:
            self._ended = time.time() if now is None else now
            for outcome in outcomes:
                if outcome.rank in self._ranks:
                    self._ranks[outcome.rank].outcome = outcome

    @property
    def finished(self) -> bool:
        return self._ended is not None

    @property
    def complete(self) -> bool:
        """Whether the last record of every rank that sent any is in. Worth a moment's wait before freezing."""
        with self._lock:
            return all(r.last for r in self._ranks.values() if r.sample is not None)

    @property
    def has_metrics(self) -> bool:
        return bool(self._series)

    def rank_points(self, metric: str, rank: int) -> list[CurvePoint]:
        """The curve of one rank; empty where it has not logged that metric."""
        with self._lock:
            series = self._series.get(metric)
            return series.rank_points(rank) if series else []

    def view(self, now: float | None = None) -> RunView:
        """The run as it stands."""
        now = time.time() if now is None else now
        with self._lock:
            at = now if self._ended is None else self._ended
            finished = self._ended is not None
            ended = {r.info.rank for r in self._ranks.values() if r.last or r.outcome is not None}
            return RunView(
                info=self.info,
                ranks=tuple(_rank_view(r, at) for r in self._ranks.values()),
                curves=tuple(s.curve(ended=ended, finished=finished, now=now) for s in self._series.values()),
                progress=_progress(list(self._ranks.values()), max(0.0, at - self.info.started), finished=finished),
                notes=tuple(self._notes),
                lost=sum(r.lost for r in self._ranks.values()),
                finished=finished,
            )

    def _metric(self, name: str) -> Series | None:
        series = self._series.get(name)
        if series is None:
            if len(self._series) >= MAX_METRICS:
                self._note(f"More than {MAX_METRICS} metrics: those after the first {MAX_METRICS} are not kept.")
                return None
            series = self._series[name] = Series(name, len(self._ranks))
        return series

    def _note(self, text: str) -> None:
        if len(self._notes) < MAX_NOTES:
            self._notes.setdefault(text)

    @staticmethod
    def _replace(rank: _Rank, sample: Sample, now: float) -> None:
        old = rank.sample
        if sample.waiting is not None:
            rank.changed = now - sample.waiting.seconds
        elif old is None or (old.state, old.line) != (sample.state, sample.line):
            rank.changed = now
        if not sample.last and sample.state != "released":
            rank.before = sample
        if sample.progress is not None:
            rank.progress = sample.progress
        rank.sample = sample


def _higher(known: dict[str, int], seen: dict[str, int]) -> dict[str, int]:
    """The peak so far: the highest total, and of each kind of a model the highest that was seen.

    A rank may reach its highest total before it has looked at its model for the first time.
    """
    highest = seen if _total(seen) > _total(known) else known
    kinds = {kind: max(known.get(kind, 0), seen.get(kind, 0)) for kind in ("parameters", "gradients", "optimizer")}
    return {**highest, **kinds, "total": _total(highest)}


def _total(memory: dict[str, int]) -> int:
    return memory.get("total") or sum(memory.get(kind, 0) for kind in MEMORY_KINDS)


def by_kind(memory: dict[str, int]) -> dict[str, int]:
    """Bytes of every kind, in stacking order, that add up to `total`.

    What the kinds leave unexplained counts as `other`. Where they say more than `total` (each was read at a slightly
    different moment), `other` and then `reserved` give way.
    """
    kinds = {kind: max(0, memory.get(kind, 0)) for kind in MEMORY_KINDS}
    missing = _total(memory) - sum(kinds.values())
    if missing >= 0:
        kinds["other"] += missing
        return kinds
    for kind in ("other", "reserved"):
        less = min(kinds[kind], -missing)
        kinds[kind] -= less
        missing += less
    return kinds


def _rank_view(rank: _Rank, now: float) -> RankView:
    sample = rank.sample
    memory = sample.memory if sample else {}
    capacity = memory.get("capacity", 0) or rank.peak.get("capacity", 0)
    state: str = sample.state if sample else "starting"
    if rank.outcome is not None and rank.outcome.status == "dead":
        state = "dead"
    return RankView(
        info=rank.info,
        sample=sample,
        memory=by_kind(memory),
        total=_total(memory),
        peak=by_kind(rank.peak),
        peak_total=_total(rank.peak),
        capacity=capacity,
        state=state,
        since=max(0.0, now - rank.changed) if sample else 0.0,
        before=rank.before,
        ended=rank.last or rank.outcome is not None,
        outcome=rank.outcome,
        lost=rank.lost,
    )


def _progress(ranks: list[_Rank], elapsed: float, *, finished: bool) -> RunProgress:
    known = [(r.info.rank, r.progress) for r in ranks if r.progress is not None]
    totals = [p.total for _, p in known if p.total is not None]
    speeds = [(p.seconds_per_step, rank) for rank, p in known if p.seconds_per_step]
    pace = median(s for s, _ in speeds) if speeds else None
    step = min((p.step for _, p in known), default=None)
    total = max(totals, default=None)
    slowest = None
    if speeds and pace and max(speeds)[0] > 1.05 * pace:
        seconds, rank = max(speeds)
        slowest = (rank, seconds)
    done = finished or (bool(known) and all(p.finished for _, p in known))
    remaining = None
    if total is not None and step is not None and pace is not None:
        remaining = 0.0 if done else max(0, total - step) * pace
    tokens = [p.tokens_per_second for _, p in known if p.tokens_per_second is not None]
    samples = [p.samples_per_second for _, p in known if p.samples_per_second is not None]
    return RunProgress(
        step=step,
        total=total,
        epoch=max((p.epoch for _, p in known), default=0),
        epochs=max((p.epochs for _, p in known), default=1),
        elapsed=elapsed,
        remaining=remaining,
        seconds_per_step=pace,
        slowest=slowest,
        tokens_per_second=sum(tokens) if tokens else None,
        samples_per_second=sum(samples) if samples else None,
    )
