"""One rank's place among the ranks, read from the launcher's environment.

Each launcher is a row of a table, property to variable. Only variables of the running step count: an allocation's
own (`SLURM_NTASKS`) say how many tasks could run, not how many do. The row that comes first wins: torchrun may run
under srun, and under Open MPI or MPICH in a Slurm job `SLURM_PROCID` belongs to the daemon that started the rank.
Limits: an `srun` typed inside a rank that Open MPI started looks like that rank, since it inherits its variables.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddl_magics.errors import StartError
from ddl_magics.protocol import World
from ddl_magics.rank.alone import world_of_one
from ddl_magics.rank.device import choose
from ddl_magics.rank.group import close_group, join, open_group, open_store
from ddl_magics.rank.rendezvous import meet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store

__all__ = [
    "LAUNCHERS",
    "Launcher",
    "World",
    "close_group",
    "from_environment",
    "join",
    "launched_by",
    "meet",
    "open_group",
    "open_store",
    "place",
    "world_of_one",
]


@dataclass(frozen=True)
class Launcher:
    """Which variable of a launcher holds which property of a rank; None where it has none."""

    name: str
    sign: str
    """The variable whose presence says that this launcher started the process."""
    rank: str
    world_size: str
    local_rank: str | None = None
    local_world_size: str | None = None
    node_rank: str | None = None
    nodes: str | None = None


LAUNCHERS = (
    Launcher(
        "torchrun",
        sign="TORCHELASTIC_RUN_ID",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        nodes="GROUP_WORLD_SIZE",
    ),
    Launcher(
        "Open MPI",
        sign="OMPI_COMM_WORLD_RANK",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MPICH",
        sign="MPI_LOCALRANKID",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
    ),
    Launcher(
        "srun",
        sign="SLURM_STEP_NUM_TASKS",
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_world_size="SLURM_STEP_TASKS_PER_NODE",
        node_rank="SLURM_NODEID",
        nodes="SLURM_STEP_NUM_NODES",
    ),
    Launcher(
        "variables set by hand",
        sign="RANK",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
    ),
)


def launched_by(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """Row of the launcher that started this process; None for a process started alone."""
    return next((row for row in LAUNCHERS if environ.get(row.sign)), None)


def from_environment(device: str = "auto", environ: Mapping[str, str] = os.environ) -> World:
    """Read this rank's place; a process that no launcher started is a world of one.

    What the launcher does not tell (Open MPI: which node) is filled in by `place`, once the ranks can talk.

    Raises
    ------
    StartError
        A variable is missing or no number, or the ranks of a node outnumber its GPUs.
    """
    row = launched_by(environ)
    if row is None:
        return World(0, 1, 0, 1, device=choose(0, 1, device))
    rank = _number(row, row.rank, environ)
    world_size = _number(row, row.world_size, environ)
    if rank is None or world_size is None or not 0 <= rank < world_size:
        missing = f"{row.rank}={environ.get(row.rank)} and {row.world_size}={environ.get(row.world_size)}"
        raise StartError(f"The environment of {row.name} says {missing}", "Unset them, or set both as numbers.")
    node_rank = _number(row, row.node_rank, environ) or 0
    nodes = _number(row, row.nodes, environ) or 1
    local_rank = _number(row, row.local_rank, environ)
    local_world_size = _tasks_of_node(environ.get(row.local_world_size or "", ""), node_rank)
    local_rank = rank if local_rank is None else local_rank
    local_world_size = world_size if local_world_size is None else local_world_size
    return World(
        rank,
        world_size,
        local_rank,
        local_world_size,
        node_rank=node_rank,
        nodes=nodes,
        device=choose(local_rank, local_world_size, device),
    )


def _number(row: Launcher, name: str | None, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name or "", "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise StartError(f"{name}={text!r} is no number (read for {row.name})", f"Unset {name}.") from None


def _tasks_of_node(text: str, node: int) -> int | None:
    """Tasks on one node from Slurm's list, `2(x3),1` being 2, 2, 2, 1; a plain number is the same everywhere."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    if not counts:
        return None
    return counts[node] if node < len(counts) else counts[0]


def place(world: World, store: Store, device: str = "auto") -> World:
    """Fill in node and place on it from the hosts that the ranks name to one another.

    A collective over the store. Nodes are numbered in the order of their lowest rank. Launchers that tell the nodes
    themselves are believed: two of their nodes may be one host.
    """
    row = launched_by()
    if world.world_size == 1 or (row is not None and row.node_rank is not None and os.environ.get(row.node_rank)):
        return world
    store.set(f"ddl/place/{world.rank}", json.dumps(_host_identity()))
    named = store.multi_get([f"ddl/place/{rank}" for rank in range(world.world_size)])
    hosts = [json.loads(name) for name in named]
    order = list(dict.fromkeys(hosts))
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    local_rank = mine.index(world.rank)
    return dataclasses.replace(
        world,
        local_rank=local_rank,
        local_world_size=len(mine),
        node_rank=order.index(hosts[world.rank]),
        nodes=len(order),
        device=choose(local_rank, len(mine), device),
    )


def _host_identity() -> str:
    """Name of this host with its boot id: two machines may carry the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
