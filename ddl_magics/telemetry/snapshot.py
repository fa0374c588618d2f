"""A run at one moment, frozen: what a `History` hands to the views. Bytes, seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddl_magics.protocol import Outcome, Sample
    from ddl_magics.telemetry.series import Curve


@dataclass(frozen=True)
class RankInfo:
    """Where one rank runs. `device` is a torch device string."""

    rank: int
    host: str = ""
    pid: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class RunInfo:
    """One run: one cell under one strategy."""

    run: str
    """Identifier, unique in the session."""
    name: str
    """As the user reads it."""
    strategy: str
    """Canonical text of its spec, as `zero:3,offload=cpu`."""
    world_size: int
    nodes: int = 1
    cell: int = 0
    started: float = field(default_factory=time.time)
    precision: str = "32"
    checkpoint_activations: bool = False
    batch: str = ""
    """How the batch is split, in words: `global batch 32 = 4 × 8`. A note of a rank that begins so does as well."""


@dataclass(frozen=True)
class RankView:
    """One rank at one moment."""

    info: RankInfo
    sample: Sample | None
    """Its latest record in this run; None before the first."""
    memory: dict[str, int]
    """Bytes by kind now; the kinds of MEMORY_KINDS are all there."""
    total: int
    """Bytes in use now: what the rank reports, or the sum of the kinds."""
    peak: dict[str, int]
    """Bytes by kind at the peak of the run."""
    peak_total: int
    capacity: int
    """Bytes of its device or machine; 0 where it is not known."""
    state: str
    """A `State` of protocol.py, or `starting` before the first record."""
    since: float
    """Seconds it has been in this state at this line, or in this collective."""
    before: Sample | None
    """Its last record before the cell ended there, or before it was freed from a collective; None before the first."""
    ended: bool
    """Whether the cell is over on this rank."""
    outcome: Outcome | None
    lost: int
    """Records of this rank that never came."""


@dataclass(frozen=True)
class RunProgress:
    """How far the run is, over all ranks."""

    step: int | None
    """Of the slowest rank; None where the cell does not use `ddl.track`."""
    total: int | None
    epoch: int
    epochs: int
    elapsed: float
    remaining: float | None
    seconds_per_step: float | None
    """Median over the ranks of their medians."""
    slowest: tuple[int, float] | None
    """The rank with the longest steps and their length, where it differs by over 5 % from the median."""
    tokens_per_second: float | None
    """Of all ranks together."""
    samples_per_second: float | None


@dataclass(frozen=True)
class RunView:
    """A run at one moment: all that a picture needs."""

    info: RunInfo
    ranks: tuple[RankView, ...]
    curves: tuple[Curve, ...]
    """In the order in which the metrics were first logged."""
    progress: RunProgress
    notes: tuple[str, ...]
    lost: int
    finished: bool

    @property
    def loss(self) -> Curve | None:
        """The metric to draw large: `loss`, or else the first that was logged."""
        return next((c for c in self.curves if c.name == "loss"), self.curves[0] if self.curves else None)
