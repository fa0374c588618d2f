"""Gradients of a split model: their mean over the whole world, and the norm of the whole model's gradient.

After a backward, the gradient of a split weight is the sum over the grid's ranks already (AxoNN reduces it in the
layer), that of a split bias the sum over its block, and that of a whole parameter is this rank's own. What is left to
sum: over the data ranks, over depth and data, and over the world. AxoNN's own `sync_gradients` sends the same sums
one parameter at a time; here they travel in buckets.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddl_magics.strategies.axonn.shard import parallel_layers
from ddl_magics.strategies.pieces import takes_cpu_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from ddl_magics.strategies.axonn.groups import Groups

BUCKET = 25 * 2**20
"""Bytes that travel in one all-reduce, as in DDP."""

Kinds = dict[str, list["nn.Parameter"]]


def kinds_of(module: nn.Module) -> Kinds:
    """Parameters of a model that are trained: split `weights`, split `biases`, and those that are `whole`."""
    layers = list(parallel_layers(module))
    kinds = {
        "weights": [layer.weight for layer in layers],
        "biases": [layer.bias for layer in layers if layer.bias is not None],
    }
    split = {id(parameter) for parameters in kinds.values() for parameter in parameters}
    kinds["whole"] = [parameter for parameter in module.parameters() if id(parameter) not in split]
    return {kind: [p for p in parameters if p.requires_grad] for kind, parameters in kinds.items()}


@torch.no_grad()
def average_gradients(kinds: Kinds, groups: Groups) -> None:
    """Make each gradient the mean over all ranks of the world, on every rank. A collective of the world."""
    _fill_gaps([parameter for parameters in kinds.values() for parameter in parameters])
    over: dict[str, list[Any]] = {
        "weights": [groups["data"]],
        "biases": [groups["depth"], groups["data"]],
        "whole": [dist.group.WORLD],
    }
    for kind, parameters in kinds.items():
        for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            for group in over[kind]:
                if dist.get_world_size(group) > 1:
                    dist.all_reduce(flat, group=group)
            flat.div_(dist.get_world_size())
            for gradient, mean in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))


def _fill_gaps(parameters: list[nn.Parameter]) -> None:
    """Zeros for a gradient that another rank has and this one has not; none where no rank has one.

    A model may use a parameter for some batches only. The optimizer then leaves it alone, weight decay included,
    exactly when one process would: when the whole batch did not use it.
    """
    if not parameters:
        return
    device = "cpu" if takes_cpu_tensors() else parameters[0].device  # reading the answer from a GPU would wait for it
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    for parameter, needed in zip(parameters, used.tolist(), strict=True):
        if needed and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients of one type in their order, up to BUCKET bytes together."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_type[gradient.dtype].append(gradient)
    for same in by_type.values():
        bucket: list[torch.Tensor] = []
        for gradient in same:
            if bucket and sum(g.nbytes for g in bucket) + gradient.nbytes > BUCKET:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket


@torch.no_grad()
def gradient_norm(kinds: Kinds, groups: Groups, device: str) -> torch.Tensor:
    """L2 norm of the whole model's gradient, 0-dim, the same on all ranks. A collective of the grid.

    Every element counts once: a weight's shards all differ; a slice of a bias is held `column * depth` times.
    """
    square = _square(kinds["weights"], device)
    square += _square(kinds["biases"], device) / (groups.grid.column * groups.grid.depth)
    dist.all_reduce(square, group=groups["copy"])
    square += _square(kinds["whole"], device)
    return square.sqrt()


def _square(parameters: list[nn.Parameter], device: str) -> torch.Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=device)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.stack(norms).square().sum()


@torch.no_grad()
def clip_gradients(kinds: Kinds, norm: torch.Tensor, max_norm: float) -> None:
    """Scale every gradient so that the norm of all is at most `max_norm`, by the formula of `clip_grad_norm_`."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameters in kinds.values():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
