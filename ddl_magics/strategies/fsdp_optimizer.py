"""The user's optimizer goes over to a rank's rows: same groups and settings; state that is there is cut too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies import fsdp_shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BY_MATRIX = frozenset({"Adafactor", "LARS", "LBFGS", "Lamb", "SOAP", "Shampoo", "SparseAdam"})
"""Optimizers, of torch and known others, that do not work element by element."""


def refuse_by_matrix(optimizer: torch.optim.Optimizer | None) -> None:
    """Raise UsageOnRankError for an optimizer that would train otherwise on rows than on the whole."""
    kind = type(optimizer).__name__
    if kind in BY_MATRIX:
        message = f"{kind} looks at a weight as a matrix or at all of them at once, and fsdp gives it rows"
        raise UsageOnRankError(message, "Use one that works element by element, such as AdamW or SGD.")


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
