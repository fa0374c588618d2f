"""A model on the meta device becomes one that is split over a grid: of a split weight each rank reads its block.

What stays whole on every rank is read whole. Memory beside the shards: one layer's weight, which AxoNN allocates before
it takes its block. Import after `adapter.load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ddl_magics.strategies.axonn import shard
from ddl_magics.strategies.homes import Home, names_on_meta, read_whole

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
    for plain in list(shard._divisible(module)):
        whole = {name: read(named[parameter]) for name, parameter in plain.named_parameters(recurse=False)}
        for name, parameter in plain.named_parameters(recurse=False):  # memory that nobody has touched costs none
            empty = torch.empty_like(parameter, device="cpu")
            Home(plain, name).put(nn.Parameter(empty, requires_grad=parameter.requires_grad))
        layer = layers[plain] = shard._parallel(plain, groups)
        for name, own in layer.named_parameters(recurse=False):
            own.copy_(layer.read(name, whole[name]).view_as(own))
            Home(plain, name).put(nn.Parameter(torch.empty(0)))
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child in layers:
                setattr(parent, name, layers[child])
    read_whole(module, read, device)
