"""One metric over the steps of a run: every rank's own curve and the mean over the ranks, in bounded memory.

Steps fall into buckets of equal width. The width starts at one step and doubles whenever there are too many buckets, so
a bucket is exact at first and later keeps how many values it holds, their weighted mean, least and greatest. NaN and
infinities never enter a mean; they are counted beside it, so that a curve goes on and still shows where they were.
The first and the latest steps are kept exactly, whatever the width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddl_magics.protocol import Point

MAX_BUCKETS = 512
"""Of one curve. Halved, so to say, each time it is reached."""
BUCKET_BUDGET = 65_536
"""Of all ranks of one metric together: with many ranks each gets fewer."""
RECENT_BUDGET = 16_384
"""Exact latest steps of all ranks of one metric together."""
LATE = 5.0
"""Seconds after which the mean no longer waits for a rank that has stopped logging a metric."""


class Bucket:
    """The values of a few neighbouring steps."""

    __slots__ = ("high", "low", "plain", "total", "used", "values", "weight", "wild")

    def __init__(self) -> None:
        self.values = 0
        self.used = 0
        """Finite values, those that `plain` sums up."""
        self.wild = 0
        """NaN and infinities."""
        self.plain = 0.0
        self.total = 0.0
        self.weight = 0.0
        self.low = math.inf
        self.high = -math.inf

    def add(self, value: float, weight: float) -> None:
        self.values += 1
        if not math.isfinite(value):
            self.wild += 1
            return
        self.used += 1
        self.plain += value
        if 0 < weight < math.inf:
            self.total += value * weight
            self.weight += weight
        self.low = min(self.low, value)
        self.high = max(self.high, value)

    def merge(self, other: Bucket) -> None:
        self.values += other.values
        self.used += other.used
        self.wild += other.wild
        self.plain += other.plain
        self.total += other.total
        self.weight += other.weight
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    @property
    def mean(self) -> float:
        """Weighted mean of the finite values, their plain mean when no weight is positive, NaN when there are none."""
        if self.weight > 0:
            return self.total / self.weight
        return self.plain / self.used if self.used else math.nan


@dataclass(frozen=True)
class CurvePoint:
    """One bucket as the views see it. `low` and `high` span the values of all ranks; NaN without a finite value."""

    step: int
    """First step of the bucket."""
    mean: float
    low: float
    high: float
    wild: int = 0
    """How many NaN and infinities it holds."""


@dataclass(frozen=True)
class Curve:
    """A metric over the steps: mean over the ranks and their spread."""

    name: str
    points: tuple[CurvePoint, ...]
    width: int
    """Steps in a bucket."""
    ranks: tuple[int, ...]
    """The ranks that log this metric."""
    first: float
    """Exact weighted mean over the ranks at the first step that all of them have logged; NaN where one was NaN."""
    last: float
    """The same at the latest such step."""
    last_step: int
    best: float
    """Lowest mean over the ranks, of one step as long as buckets hold one step; NaN without a finite value."""
    wild: int
    """NaN and infinities in the whole run, over all ranks."""
    first_wild: int | None
    """The step (of its bucket) where the first of them was."""


class Buckets:
    """A growing curve that merges neighbours when it gets too long."""

    def __init__(self, limit: int) -> None:
        self.limit = max(limit, 2)
        self.width = 1
        self.by_index: dict[int, Bucket] = {}

    def add(self, step: int, value: float, weight: float) -> None:
        index = step // self.width
        bucket = self.by_index.get(index)
        if bucket is None:
            bucket = self.by_index[index] = Bucket()
            if len(self.by_index) > self.limit:
                self.widen()
                bucket = self.by_index[step // self.width]
        bucket.add(value, weight)

    def widen(self) -> None:
        while len(self.by_index) > self.limit:
            self.width *= 2
            merged: dict[int, Bucket] = {}
            for index, bucket in self.by_index.items():
                if (at := index // 2) in merged:
                    merged[at].merge(bucket)
                else:
                    merged[at] = bucket
            self.by_index = merged

    def points(self, until: int | None = None) -> list[CurvePoint]:
        points = []
        for index in sorted(self.by_index):
            # A bucket whose last step is not in yet still has the steps before it: show it once it has begun.
            if until is not None and index * self.width > until:
                break
            b = self.by_index[index]
            low, high = (b.low, b.high) if b.used else (math.nan, math.nan)
            points.append(CurvePoint(index * self.width, b.mean, low, high, b.wild))
        return points


class RankSeries:
    """One metric of one rank: its curve, and its first and latest steps exactly."""

    def __init__(self, limit: int, recent: int) -> None:
        self.buckets = Buckets(limit)
        self.recent: dict[int, Bucket] = {}
        self.keep_first = recent
        self.earliest: dict[int, Bucket] = {}
        self.newest: int | None = None
        self.reached = 0
        """The highest step, which is not the newest when a second loop began at 0 again."""
        self.arrived = -math.inf
        self.wild: dict[int, float] = {}
        """The latest NaN or infinity of a recent step: a mean of that step must be that, too."""

    def add(self, point: Point, now: float) -> None:
        self.buckets.add(point.step, point.value, point.weight)
        self._exact(self.earliest, point, drop=False)
        self._exact(self.recent, point, drop=True)
        self.newest = point.step
        self.reached = max(self.reached, point.step)
        self.arrived = now

    def _exact(self, steps: dict[int, Bucket], point: Point, *, drop: bool) -> None:
        bucket = steps.get(point.step)
        if bucket is not None and point.step != self.newest:
            # A second loop came to this step again: the first value stays the first, the latest becomes this one.
            if not drop:
                return
            del steps[point.step]
            bucket = None
        if bucket is None:
            if len(steps) >= self.keep_first:
                if not drop:
                    return
                gone = next(iter(steps))
                del steps[gone]
                self.wild.pop(gone, None)
            bucket = steps[point.step] = Bucket()
        bucket.add(point.value, point.weight)
        if not math.isfinite(point.value):
            self.wild[point.step] = point.value


class Series:
    """One metric of all ranks. Not locked: `History` does that."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        self.mean = Buckets(MAX_BUCKETS)
        self.by_rank: dict[int, RankSeries] = {}
        self._limit = max(64, min(MAX_BUCKETS, BUCKET_BUDGET // max(ranks, 1)))
        self._recent = max(32, min(256, RECENT_BUDGET // max(ranks, 1)))

    def add(self, rank: int, point: Point, now: float) -> None:
        series = self.by_rank.get(rank)
        if series is None:
            series = self.by_rank[rank] = RankSeries(self._limit, self._recent)
        series.add(point, now)
        self.mean.add(point.step, point.value, point.weight)

    def rank_points(self, rank: int) -> list[CurvePoint]:
        """The curve of one rank; empty where it has not logged this metric."""
        series = self.by_rank.get(rank)
        return series.buckets.points() if series else []

    def curve(self, *, ended: set[int], finished: bool, now: float) -> Curve:
        """The mean over the ranks up to the step that all of them have reached.

        Ranks report up to a second apart; a mean over the first to report would wobble at its end. Ranks in `ended`
        and those that stopped logging the metric are not waited for.
        """
        until = None
        if not finished:
            live = [s for r, s in self.by_rank.items() if r not in ended and now - s.arrived < LATE]
            until = min((s.reached for s in live), default=None)
        points = self.mean.points(until)
        means = [p.mean for p in points if math.isfinite(p.mean)]
        marked = [p for p in points if p.wild]
        first, _ = self._exact_mean("earliest")
        last, last_step = self._exact_mean("recent")
        return Curve(
            name=self.name,
            points=tuple(points),
            width=self.mean.width,
            ranks=tuple(sorted(self.by_rank)),
            first=first,
            last=last,
            last_step=last_step,
            best=min(means, default=math.nan),
            wild=sum(p.wild for p in marked),
            first_wild=marked[0].step if marked else None,
        )

    def _exact_mean(self, which: str) -> tuple[float, int]:
        """Weighted mean over the ranks at the first (`earliest`) or latest (`recent`) step that all of them have."""
        stores: list[dict[int, Bucket]] = [getattr(s, which) for s in self.by_rank.values()]
        stores = [s for s in stores if s]
        if not stores:
            return math.nan, 0
        shortest = min(stores, key=len)
        order = shortest if which == "earliest" else reversed(shortest)
        common = (step for step in order if all(step in s for s in stores))
        # Ranks that share no step (each logs its own) are taken at their own first or latest step.
        step = next(islice(common, 1), None)
        if step is None:
            picks = [(next(iter(s)) if which == "earliest" else next(reversed(s))) for s in stores]
        else:
            picks = [step] * len(stores)
        sum_, weight, plain, used = 0.0, 0.0, 0.0, 0
        for store, at in zip(stores, picks, strict=True):
            b = store[at]
            if b.wild:
                return self._wild_at(at), at
            sum_ += b.total
            weight += b.weight
            plain += b.plain
            used += b.used
        mean = sum_ / weight if weight > 0 else plain / max(used, 1)
        return mean, max(picks)

    def _wild_at(self, step: int) -> float:
        """What a mean that holds NaN or infinities is: an infinity when it is the only kind, NaN otherwise."""
        seen = {s.wild[step] for s in self.by_rank.values() if step in s.wild and not math.isnan(s.wild[step])}
        any_nan = any(math.isnan(s.wild[step]) for s in self.by_rank.values() if step in s.wild)
        return seen.pop() if len(seen) == 1 and not any_nan else math.nan
