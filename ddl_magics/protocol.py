"""What travels between the notebook and the ranks: requests, outcomes, telemetry records.

Every type here is a frozen dataclass of plain values with `to_wire` and `from_wire`, so that it crosses as a
JSON-able dict and both sides can evolve apart. Nothing here imports torch or IPython. Units: bytes, seconds,
Unix time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Status = Literal["ok", "error", "interrupted", "released", "dead"]
"""How a cell ended on one rank. `released`: freed from a collective because another rank failed."""

State = Literal["idle", "running", "waiting", "stopped", "released", "dead"]
"""What a rank is doing now. `waiting`: in a collective; `stopped`: at a breakpoint."""

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "other", "reserved")
"""Kinds of memory, in the order in which they are stacked in a bar. Two more keys of `Sample.memory` are not
kinds: `total` (CUDA: what torch has reserved; CPU: what the process has allocated beyond what it had, models aside,
when the cell began) and `capacity` (of the device or the machine). On a CPU `resident` is the memory of the whole
process."""

TELEMETRY = "ddl_telemetry"
"""Message type of a `Sample` on the engines' IOPub channel."""

CHAT = "ddl_chat"
"""Message type of what rank 0 tells of a chat, by its key `chat`: that it is open (with `model` and `strategy`), a
piece of an answer (`text`), or how the answer went (`figures`)."""


PROGRAM_VARIABLES = {
    "strategy": "DDL_MAGICS_STRATEGY",
    "precision": "DDL_MAGICS_PRECISION",
    "checkpoint_activations": "DDL_MAGICS_CHECKPOINT_ACTIVATIONS",
    "steps": "DDL_MAGICS_STEPS",
    "seed": "DDL_MAGICS_SEED",
    "device": "DDL_MAGICS_DEVICE",
}
"""Environment variables by which `ddl-magics run` tells a program what its `init` does not say."""


JOB = "DDL_MAGICS_JOB"
"""Environment variable: what the ranks of one `ddl-magics run` on one machine share, and no other job has."""


class Wire:
    """A dataclass that crosses the wire as a dict; unknown keys are ignored, so that versions may differ."""

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{key: value for key, value in wire.items() if key in names})


@dataclass(frozen=True)
class World(Wire):
    """One rank's place among the ranks, in torchrun's words."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    nodes: int = 1
    device: str = "cpu"
    """A valid torch device string of this rank: `cpu` or `cuda:I`."""


@dataclass(frozen=True)
class Waiting(Wire):
    """The collective, or point-to-point call, that a rank is in."""

    name: str
    """As in torch.distributed: `all_reduce`, `barrier`, `recv`."""
    seconds: float = 0.0
    group: tuple[int, ...] = ()
    """Ranks of its process group, empty where that is unknown."""
    group_name: str = ""
    number: int = 0
    """Sequence number in the group, from 1: ranks in one collective have the same. 0: unknown."""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    call: str = ""
    """The context's own call that it belongs to, such as `ddl.barrier`."""

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        return super().from_wire(
            wire
            | {"group": tuple(wire.get("group", ())), "shapes": tuple(tuple(shape) for shape in wire.get("shapes", ()))}
        )


@dataclass(frozen=True)
class CellRequest(Wire):
    """One `%%ddl` cell, under one strategy."""

    code: str
    cell: int
    """Number of the cell as the notebook shows it, `In[cell]`; tracebacks of the ranks say the same."""
    run: str
    """Identifier of the run that this cell opens, unique in the session."""
    name: str
    """Name of the run as the user reads it."""
    strategy: str = "ddp"
    """Canonical text of one strategy, see `strategies.spec`."""
    ranks: tuple[int, ...] | None = None
    precision: str = "32"
    seed: int | None = None
    """None: ranks keep their random state, and `model_init` and the order of the data use seed 0."""
    timeout: float | None = None
    checkpoint_activations: bool = False
    """What `prepare` of this cell does with activations, see `strategies.base.Training`."""
    steps: int | None = None
    """`ddl.track` ends its loop after so many optimizer steps of this cell."""
    keep_frames: bool = False
    """Keep the frames of a failure for lack of memory, which are dropped at once else."""
    part: int = 0
    """Which run of a comparison this is, from 0. Each starts with the variables as they were before the first."""
    parts: int = 1


@dataclass(frozen=True)
class Outcome(Wire):
    """How a cell ended on one rank."""

    rank: int
    status: Status
    seconds: float = 0.0
    ename: str = ""
    evalue: str = ""
    traceback: tuple[str, ...] = ()
    line: int | None = None
    """The line of the user's cell where the error came from."""
    of: str = ""
    """`In[3]` where that is a line of an earlier cell, whose function this one called."""
    failed_at: float | None = None
    """Unix time of the failure on that rank: the first in time is the likely cause."""
    before: str = ""
    """Of a rank that was stopped or released: the error that it was busy with then, as in a `finally`."""
    waiting: Waiting | None = None
    """Of a released rank: what it waited in."""
    groups: dict[str, int] = field(default_factory=dict)
    """Collectives so far by process group: ranks that differ are out of step, also when nobody waits."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes by kind where the cell failed, its frames still alive; see `Sample.memory`."""
    broken: bool = False
    """The process group on this rank must be made anew: its connections were closed."""
    unsettled: bool = False
    """A model of `ddl.prepare` was in the middle of a step, which a later cell must not go on with."""

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        wire = dict(wire)
        if wire.get("waiting"):
            wire["waiting"] = Waiting.from_wire(wire["waiting"])
        return super().from_wire(wire)


@dataclass(frozen=True)
class Point(Wire):
    """One value of one metric."""

    name: str
    step: int
    value: float
    time: float
    weight: float = 1.0
    """This rank's weight in the mean over ranks (its number of samples or tokens)."""

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        # JSON has no NaN and no infinity: Jupyter's messages carry their names.
        return super().from_wire(wire | {name: float(wire[name]) for name in ("value", "weight") if name in wire})


@dataclass(frozen=True)
class Progress(Wire):
    """How far `ddl.track` is on one rank."""

    step: int = 0
    total: int | None = None
    """Steps of the whole loop, None where the loader has no length."""
    epoch: int = 0
    epochs: int = 1
    seconds_per_step: float | None = None
    """Median over the last steps."""
    tokens_per_second: float | None = None
    """Of this rank alone; the view adds the ranks up."""
    samples_per_second: float | None = None
    finished: bool = False


@dataclass(frozen=True)
class Sample(Wire):
    """One telemetry record of one rank."""

    rank: int
    seq: int
    """Counts up by one for each record of a rank, so that a lost record is noticed."""
    time: float
    cell: int = 0
    run: str = ""
    state: State = "idle"
    line: int | None = None
    """Line of the user's cell that runs now."""
    source: str = ""
    """That line's text."""
    waiting: Waiting | None = None
    """The collective that it waits in."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes by kind now, see MEMORY_KINDS."""
    peak: dict[str, int] = field(default_factory=dict)
    """Bytes by kind at this rank's peak of the run; `peak["total"]` is that peak."""
    points: tuple[Point, ...] = ()
    progress: Progress | None = None
    notes: tuple[str, ...] = ()
    """Sentences for the user, each said once."""
    last: bool = False
    """The last record of the run on this rank."""

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        wire = dict(wire)
        wire["points"] = tuple(Point.from_wire(p) for p in wire.get("points", ()))
        if wire.get("progress"):
            wire["progress"] = Progress.from_wire(wire["progress"])
        if wire.get("waiting"):
            wire["waiting"] = Waiting.from_wire(wire["waiting"])
        wire["notes"] = tuple(wire.get("notes", ()))
        return super().from_wire(wire)
