"""Whole weights out of a split model and into it, under the names that the plain model has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ddl_magics.strategies.axonn.shard import parallel_layers
from ddl_magics.strategies.common import broadcast_from_rank_zero
from ddl_magics.strategies.weights import match_names

if TYPE_CHECKING:
    from torch import nn

    from ddl_magics.strategies.axonn.linear import ParallelLinear

Homes = dict[int, tuple["ParallelLinear", str]]
"""Identity of a shard -> its layer and its name there."""


@torch.no_grad()
def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Whole weights on the CPU, on every rank; a collective. Tied names share one tensor, as in a plain model."""
    known = homes(module)
    buffers = {id(buffer) for buffer in module.buffers()}
    copies: dict[int, torch.Tensor] = {}
    state = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            whole = _join(tensor, known)
            if id(tensor) in buffers:  # running statistics differ between ranks: rank 0's are the model's, as in DDP
                whole = whole.clone()
                broadcast_from_rank_zero([whole])
            copies[id(tensor)] = whole.detach().to("cpu", copy=True)
        state[name] = copies[id(tensor)]
    return state


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Whole weights in; every rank gives the same. Raises as `match_names` does, the model then being unchanged."""
    known = homes(module)
    own = module.state_dict(keep_vars=True)
    for tensor, whole in match_names(module, state, {name: shape_of(own[name], known) for name in own}):
        if id(tensor) in known:
            layer, name = known[id(tensor)]
            tensor.copy_(layer.cut(name, whole))
        else:
            tensor.copy_(whole)


def homes(module: nn.Module) -> Homes:
    """Where each shard of a model is."""
    return {
        id(parameter): (layer, name)
        for layer in parallel_layers(module)
        for name, parameter in layer.named_parameters(recurse=False)
    }


def shape_of(tensor: torch.Tensor, homes: Homes) -> torch.Size:
    """Whole shape of a parameter or buffer."""
    if id(tensor) not in homes:
        return tensor.shape
    layer, name = homes[id(tensor)]
    return layer.shape_of(name)


def _join(tensor: torch.Tensor, homes: Homes) -> torch.Tensor:
    if id(tensor) not in homes:
        return tensor
    layer, name = homes[id(tensor)]
    return layer.join(name, tensor)
