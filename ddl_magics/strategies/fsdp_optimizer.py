"""The user's optimizer goes over to a rank's rows: same groups and settings; state that is there is cut too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ddl_magics.strategies import fsdp_shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def move(optimizer: torch.optim.Optimizer, successors: fsdp_shards.Successors, mesh: DeviceMesh) -> None:
    """Put the rows where the parameters before them were."""
    for group in optimizer.param_groups:
        group["params"][:] = [successors.get(parameter, parameter) for parameter in group["params"]]
    for old, new in successors.items():
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {key: _cut(value, new, mesh) for key, value in state.items()}


def _cut(value: Any, parameter: torch.Tensor, mesh: DeviceMesh) -> Any:
    """Rows of one entry of a parameter's state; what is not shaped as the parameter (a step count) stays."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    place = fsdp_shards.local(parameter).device
    if isinstance(value, DTensor):
        return fsdp_shards.wrap(value.to_local().to(place), mesh, value.shape)
    return fsdp_shards.cut(value, mesh, place)
