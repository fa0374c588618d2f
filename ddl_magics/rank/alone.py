"""A rank that is for a while a world of its own, for cells that run on rank 0 alone while the others stand by.

Collectives of raw `torch.distributed` code in such a cell must not wait for ranks that do not come, and destroying
"the" group must not destroy the one of all ranks. torch keeps its groups in tables of one module; they are set aside
as a whole and put back after. Limits: groups that a program keeps from before are those of all ranks, and using one
in here hangs as it would anywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddl_magics.protocol import World
from ddl_magics.rank import environment, group

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def world_of_one() -> Iterator[World]:
    """Within it the default group is of this rank alone, and the environment says world size 1.

    Works with a group open or none. Groups made within are destroyed at the end.
    """
    opened = group.opened()
    aside = _GroupsAside.take()
    device = opened.world.device if opened is not None else "cpu"
    alone = World(0, 1, 0, 1, device=device)
    overlay = environment.Overlay(environment.variables(alone))
    if opened is not None:
        group.put(dataclasses.replace(opened, world=alone, store=dist.HashStore(), adopted=False))
        group.make("ddl/alone")
    forget_cached_worlds()
    try:
        yield alone
    finally:
        group.put(opened)
        if dist.is_initialized():
            dist.destroy_process_group()
        overlay.remove()
        aside.put_back()
        forget_cached_worlds()


@dataclass
class _GroupsAside:
    """All process groups of this process, taken out of torch's tables."""

    tables: dict[str, dict[Any, Any]] = field(default_factory=dict)
    count: int = 0
    default: Any = None

    @classmethod
    def take(cls) -> _GroupsAside:
        world = c10d._world
        aside = cls({name: dict(getattr(world, name)) for name in group.TABLES}, world.group_count, world.default_pg)
        for name in group.TABLES:
            getattr(world, name).clear()
        c10d._unregister_all_process_groups()
        # Ranks name a group by counting: what is counted in here must not put this rank out of step with the others.
        world.group_count = 0
        c10d._update_default_pg(None)
        return aside

    def put_back(self) -> None:
        world = c10d._world
        for name, table in self.tables.items():
            getattr(world, name).update(table)
        for process_group, name in self.tables["pg_names"].items():
            c10d._register_process_group(name, process_group)
        world.group_count = self.count
        c10d._update_default_pg(self.default)


def forget_cached_worlds() -> None:
    """Make Accelerate read the world anew: it keeps what it read first for the life of the process."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
