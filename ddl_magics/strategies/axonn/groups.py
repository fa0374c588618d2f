"""The process groups of one grid on one rank: made by one `axonn.init`, kept, and destroyed.

Layers reach their groups through this object and hold none themselves: a group of gloo keeps its threads and sockets
until its last reference is gone, and a user's model lives longer than a grid. For the same reason a copy of a model
(`copy.deepcopy`, an average of weights) shares its groups with the original.
Limits: the graph of a loss that the user keeps holds the groups that it ran over, as long as it lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies.axonn import adapter

if TYPE_CHECKING:
    from typing import Self

    from ddl_magics.protocol import World
    from ddl_magics.strategies.axonn.grid import Grid

GROUPS = {
    "inner": "inner_intra_layer_parallel_group",
    "outer": "outer_intra_layer_parallel_group",
    "block": "outer_inner_intra_layer_parallel_group",
    "depth": "depth_intra_layer_parallel_group",
    "copy": "intra_layer_group",
    "data": "data_parallel_group",
}
"""Our word for a group -> AxoNN's. `inner`: ranks along a row, which share out a layer's inputs (`column` of them);
`outer`: along a column, which share out its outputs (`row` of them); `block`: both together; `copy`: all ranks that
hold one copy of the model together; `data`: the ranks that hold the same shard."""


class Groups:
    """Process groups of one grid. Making one is a collective of the whole world."""

    def __init__(self, grid: Grid, world: World) -> None:
        adapter.load(world.device)
        self.grid = grid
        self.world = world
        self._handle: Any = None
        self._make()

    def _make(self) -> None:
        from axonn import axonn

        grid = self.grid
        axonn.init(
            G_inter=1,
            G_data=self.world.world_size // grid.size,
            G_intra_r=grid.row,
            G_intra_c=grid.column,
            G_intra_d=grid.depth,
            gpus_per_node=_gpus_per_node(self.world),
        )
        self._handle = axonn.comm_handle
        self._config = dict(vars(axonn.config))

    def remake(self) -> None:
        """Make all groups anew over the present world, for layers that go on with this object; a collective."""
        self.close()
        forget_overlap()
        self._make()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def closed(self) -> bool:
        return self._handle is None

    def __getitem__(self, name: str) -> dist.ProcessGroup:
        """Group of that name, see GROUPS."""
        if self._handle is None:
            raise UsageOnRankError(
                f"The ranks that this model was split over (axonn:{self.grid.text}) were taken apart since",
                "Build the model again and call ddl.prepare.",
            )
        return getattr(self._handle, GROUPS[name])  # type: ignore[no-any-return]

    def activate(self) -> None:
        """Make this the grid that AxoNN's constructors use: AxoNN knows one at a time, in globals of its own."""
        from axonn import axonn

        axonn.comm_handle = self._handle
        axonn.is_initialized = True
        vars(axonn.config).update(self._config)

    def close(self) -> None:
        """Destroy the groups, also those that went already with the default group. Not a collective on gloo."""
        from axonn import axonn

        if self._handle is None:
            return
        for name in GROUPS:
            try:
                dist.destroy_process_group(self[name])
            except ValueError:  # torch does not know it any more: the default group took it along
                continue
        if axonn.comm_handle is self._handle:
            axonn.comm_handle = None
            axonn.is_initialized = False
        self._handle = None


def forget_overlap() -> None:
    """Put AxoNN's overlap of communication back to where nothing is under way.

    Its own end of a block waits for the collectives that are under way, and where one has failed leaves the rest
    undone: gathered weights of a past step would then be taken for the present ones.
    """
    from axonn.intra_layer import overlap_communication

    overlap_communication.OVERLAP_ALL_REDUCE = overlap_communication.OVERLAP_REDUCE_SCATTER = False
    overlap_communication.ALL_GATHER_ITERATOR = None
    overlap_communication.handles = []
    overlap_communication.pending_grad_accumulations = []
    overlap_communication.weights_cache = {}


def _gpus_per_node(world: World) -> int:
    """The number with which AxoNN's rule, device = rank modulo GPUs per node, names this rank's own device."""
    device = torch.device(world.device)
    if device.type == "cpu":
        return world.local_world_size  # only for AxoNN's own arithmetic: there is no device to name
    index = device.index or 0
    fitting = (number for number in range(1, world.world_size + 2) if world.rank % number == index)
    number = world.local_world_size if world.rank % world.local_world_size == index else next(fitting, None)
    if number is not None:
        return number
    raise UsageOnRankError(
        f"AxoNN cannot use {world.device} on rank {world.rank}: it takes device = rank modulo GPUs of a node",
        "Start ranks node by node, one for each GPU.",
    )
