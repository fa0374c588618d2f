"""Which tensors of this rank are shards, and of what: ranks that hold different shards are not different.

A **shard key** is a text that two ranks share for one tensor exactly when they hold the same part of it; it is empty
for a tensor that every rank holds whole. Known are parameters of ZeRO stage 3 (also of a user's own DeepSpeed engine),
the state of optimizers that were prepared under `zero`, layers that AxoNN split, and DTensors (FSDP). Only local
knowledge is used, no collective, so that it holds for a broken process group too: where its groups are gone, each rank
counts as holding a shard of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ddl_magics.rank.training import Training


class Held(NamedTuple):
    """What this rank holds of a tensor."""

    local: torch.Tensor | None
    """None where nothing of it is here now."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    key: str


class Shards:
    """Knows the shards of this rank. `trainings`: what stands behind the prepared models that live."""

    def __init__(self, rank: int, trainings: list[Training]) -> None:
        self._own = f"rank {rank}"
        self._trainings = trainings
        self._axonn: dict[int, tuple[str, tuple[int, ...]]] = {}
        for training in trainings:
            self.learn(training.prepared.module)

    def learn(self, module: torch.nn.Module) -> None:
        """Note the parameters of layers that AxoNN split, which do not say so themselves."""
        layer: Any
        for layer in module.modules():
            if type(layer).__name__ == "ParallelLinear" and hasattr(layer, "shape_of"):
                for name, parameter in layer.named_parameters(recurse=False):
                    self._axonn[id(parameter)] = self._of_layer(layer, name), tuple(layer.shape_of(name))

    def held(self, tensor: torch.Tensor) -> Held:
        """What is here of a tensor."""
        if id(tensor) in self._axonn:
            key, shape = self._axonn[id(tensor)]
            return Held(tensor, shape, key)
        if hasattr(tensor, "ds_tensor"):
            return self._of_zero(tensor)
        if hasattr(tensor, "device_mesh") and hasattr(tensor, "placements"):
            return self._of_dtensor(tensor)
        return Held(tensor, tuple(tensor.shape), "")

    def of_optimizer(self, optimizer: Any) -> str:
        """Shard key of all that an optimizer holds; empty where each of its parameters says so by itself."""
        for training in self._trainings:
            prepared = training.prepared
            if prepared.strategy.name == "zero" and prepared.optimizer is optimizer and not training.closed:
                return self._own
        return self._own if hasattr(optimizer, "partition_count") else ""  # DeepSpeed's own wrapper

    def _of_layer(self, layer: Any, name: str) -> str:
        groups = ("outer",) if name == "bias" else ("outer", "inner", "depth")
        try:
            found = [layer.groups[group] for group in groups]
            places = [(dist.get_rank(group), dist.get_world_size(group)) for group in found]
        except Exception:  # noqa: BLE001 - torch and AxoNN say in many ways that a group is gone
            return self._own
        if any(place < 0 for place, _ in places):
            return self._own
        return "" if all(size == 1 for _, size in places) else "x".join(str(place) for place, _ in places)

    def _of_zero(self, parameter: Any) -> Held:
        """Small parameters stay whole, and others are whole for the time of their use."""
        shape = tuple(parameter.ds_shape)
        if parameter.data.numel() == parameter.ds_numel and parameter.ds_numel:
            return Held(parameter, shape, "")
        try:
            place = dist.get_rank(parameter.ds_process_group)
        except Exception:  # noqa: BLE001 - as above
            place = -1
        return Held(parameter.ds_tensor, shape, self._own if place < 0 else f"part {place}")

    @staticmethod
    def _of_dtensor(tensor: Any) -> Held:
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return Held(None, tuple(tensor.shape), "outside its mesh")
        split = [
            f"{dimension}:{place}"
            for dimension, (place, placement) in enumerate(zip(coordinate, tensor.placements, strict=True))
            if not placement.is_replicate() and tensor.device_mesh.size(dimension) > 1
        ]
        local = tensor.detach()._local_tensor  # noqa: SLF001 - `to_local` refuses those of partial sums
        return Held(local, tuple(tensor.shape), " ".join(split))
