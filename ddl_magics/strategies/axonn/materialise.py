"""A model on the meta device becomes one that is split over a grid: of a split weight each rank reads its block.

What stays whole on every rank is read whole. On a GPU one layer's weight is allocated beside the shards: AxoNN takes
its block from a whole one. Import after `adapter.load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ddl_magics.strategies.axonn import shard
from ddl_magics.strategies.homes import names_on_meta, read_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.strategies.axonn.groups import Groups
    from ddl_magics.strategies.axonn.linear import ParallelLinear
    from ddl_magics.strategies.base import Whole


@torch.no_grad()
def materialise(module: nn.Module, groups: Groups, read: Callable[[str], Whole], device: str) -> None:
    """Split and fill a model; `read` gives a whole tensor by its first name."""
    named = names_on_meta(module)
    groups.activate()
    layers: dict[nn.Module, ParallelLinear] = {}
    for plain in list(shard.divisible(module)):
        layer = layers[plain] = shard.parallel(plain, groups)
        for name, parameter in plain.named_parameters(recurse=False):
            own = getattr(layer, name)
            own.copy_(layer.read(name, read(named[parameter])).view_as(own))
    shard.put_in_place(module, layers)
    read_whole(module, read, device)
