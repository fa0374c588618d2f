"""Splits a plain model over a grid and its optimizer with it, and puts whole weights together again.

What is split: every `torch.nn.Linear` whose features divide by the grid. What stays whole on every rank: other kinds
of layers (embeddings, norms, convolutions, GPT-2's Conv1D), layers that share a weight with another (tied embeddings),
and those that carry parametrizations. Import after `adapter.load`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from axonn.intra_layer.automatic_parallelism import is_parallelizable_linear
from torch import nn

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies.axonn.linear import ParallelLinear
from ddl_magics.strategies.common import broadcast_from_rank_zero
from ddl_magics.strategies.pieces import takes_cpu_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddl_magics.strategies.axonn.groups import Groups

Successors = dict[nn.Parameter, tuple[ParallelLinear, str]]
"""Parameter of the plain model -> the layer that holds its shard, and the shard's name there."""

BY_MATRIX = ("Adafactor", "Muon")
"""Optimizers of torch whose update of one weight depends on its rows and columns, which a flat shard lacks."""


@dataclass(frozen=True)
class Split:
    """What became of a model, in numbers of parameters and layers."""

    split: int
    whole: int
    layers: int
    all_layers: int

    def note(self, grid: str) -> str:
        share = self.split / max(1, self.split + self.whole)
        said = f"axonn:{grid} splits {share:.0%} of the parameters ({self.layers} of {self.all_layers} Linear layers)"
        if not self.split:
            return (
                f"axonn:{grid} splits nothing of this model, which has no torch.nn.Linear that the grid divides: "
                "every rank holds it whole."
            )
        if not self.whole:
            return f"{said}."
        return f"{said}; the rest (embeddings, norms, layers tied or not divisible by the grid) is whole on every rank."


def parallel_layers(module: nn.Module) -> Iterator[ParallelLinear]:
    """Return the layers of a model that are split, each once."""
    return (layer for layer in module.modules() if isinstance(layer, ParallelLinear))


def refuse_foreign(module: nn.Module, groups: Groups) -> None:
    """Raise UsageOnRankError for a model that is split over another grid, or over this one before it was rebuilt."""
    for layer in parallel_layers(module):
        if layer.groups is not groups:
            raise UsageOnRankError(
                f"This {type(module).__name__} is split over axonn:{layer.groups.grid.text} already and cannot move to "
                f"axonn:{groups.grid.text}",
                "Build it anew, and load its full state where the weights matter.",
            )


def split_model(module: nn.Module, groups: Groups, device: str) -> tuple[nn.Module, Successors]:
    """Replace the model's linear layers by parallel ones, in place, with rank 0's weights.

    It stays where it is, so that a GPU need not hold the whole model, unless its ranks cannot talk there.

    Returns the module (another one only where the model is itself a single linear layer) and, for each parameter
    that was replaced, where its shard is.
    """
    if not takes_cpu_tensors():
        module.to(device)
    shards = {id(parameter) for layer in parallel_layers(module) for parameter in layer.parameters()}
    # Shards of models that differ make no model; DDP, too, starts from rank 0's.
    broadcast_from_rank_zero(t for t in (*module.parameters(), *module.buffers()) if id(t) not in shards)
    groups.activate()
    layers: dict[nn.Module, ParallelLinear] = {plain: parallel(plain, groups) for plain in divisible(module)}
    put_in_place(module, layers)
    _avoid_fused_kernels(module)
    successors = {
        parameter: (layer, name)
        for plain, layer in layers.items()
        for name, parameter in plain.named_parameters(recurse=False)
    }
    return layers.get(module, module), successors


def put_in_place(module: nn.Module, layers: dict[nn.Module, ParallelLinear]) -> None:
    """Put parallel layers where the plain ones stand within a module, everywhere that they do."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child in layers:
                setattr(parent, name, layers[child])


def divisible(module: nn.Module) -> Iterator[nn.Linear]:
    """Yield the linear layers of a module that the present grid can split."""
    uses = Counter(id(parameter) for owner in module.modules() for parameter in owner._parameters.values())
    for layer in module.modules():
        # A subclass may read its weight in ways of its own, as attention's out_proj does; so may a parametrized one.
        if type(layer) is not nn.Linear or "weight" not in layer._parameters:
            continue
        own = all(uses[id(parameter)] == 1 for parameter in layer._parameters.values() if parameter is not None)
        if own and is_parallelizable_linear(layer.in_features, layer.out_features):
            yield layer


def parallel(plain: nn.Linear, groups: Groups) -> ParallelLinear:
    """Parallel form of a layer, with the hooks that the user put on it."""
    layer = ParallelLinear(plain, groups)
    for name, value in vars(plain).items():
        if name.endswith("_hooks") and value:
            getattr(layer, name).update(value)
    return layer


def _avoid_fused_kernels(module: nn.Module) -> None:
    """Torch's transformer layers read the weights of their linear layers themselves in inference, unless told so."""
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        elif isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


def measure(module: nn.Module) -> Split:
    """Count what is split, in parameters of the whole model."""
    layers = list(parallel_layers(module))
    split = sum(layer.out_features * (layer.in_features + (layer.bias is not None)) for layer in layers)
    shards = {id(parameter) for layer in layers for parameter in layer.parameters()}
    whole = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in shards)
    plain = sum(isinstance(layer, nn.Linear) for layer in module.modules())
    return Split(split, whole, len(layers), len(layers) + plain)


def refuse_by_matrix(optimizer: torch.optim.Optimizer | None, grid: str) -> None:
    """Raise UsageOnRankError for an optimizer that flat shards would not serve."""
    if type(optimizer).__name__ in BY_MATRIX:
        raise UsageOnRankError(
            f"{type(optimizer).__name__} updates a weight by its rows and columns, and axonn:{grid} keeps flat shards",
            "Use an optimizer that works element by element, such as AdamW or SGD, or another strategy.",
        )


def split_optimizer(optimizer: torch.optim.Optimizer, successors: Successors) -> None:
    """Put the shards where the whole parameters were, same groups and settings; state that is there is split too."""
    shards = {old: getattr(layer, name) for old, (layer, name) in successors.items()}
    for group in optimizer.param_groups:
        group["params"][:] = [shards.get(parameter, parameter) for parameter in group["params"]]
    for old, (layer, name) in successors.items():
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[shards[old]] = {key: _cut_state(layer, name, value, old) for key, value in state.items()}


def _cut_state(layer: ParallelLinear, name: str, value: Any, whole: nn.Parameter) -> Any:
    """Shard of one entry of a parameter's state; what is not shaped as the parameter (a step count) stays."""
    if isinstance(value, torch.Tensor) and value.shape == whole.shape:
        return layer.cut(name, value)
    return value


def place_state(optimizer: torch.optim.Optimizer) -> None:
    """Move state that is shaped as its parameter to where the parameter is now."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[key] = value.to(parameter.device)
