"""What a checkpoint keeps of a model whose optimizer has a state for each parameter: weights and that state, by name.

Torch's optimizers keep for a parameter tensors of its shape (`exp_avg`), counts (`step`), and now and then a tensor of
another shape (Adafactor's `row_var`). Here they become entries, whole and under the parameter's name, and entries
become state again. Limits: state that is neither a tensor nor a number (LBFGS's lists) is refused; what a module
keeps as `get_extra_state` is not a tensor and not kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies.base import Entry, Prepared
from ddl_magics.strategies.pieces import Piece, collect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddl_magics.strategies.base import Training, Whole

WEIGHT, MASTER, STEP = "weight", "master", "step"

FROM_THE_START = frozenset({"Adagrad"})
"""Optimizers of torch that make their state when they are made, and have no way to make it again."""


def first_names(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a module by name; what is tied stands once, under its first name."""
    seen: set[int] = set()
    named = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def as_tensor(value: Any, optimizer: torch.optim.Optimizer, key: str) -> torch.Tensor:
    """One part of an optimizer's state: a tensor as it is, a number 0-dim as int64 or float64."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
    raise UsageOnRankError(
        f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r}: a checkpoint takes tensors and numbers",
        "Save ddl.full_state_dict(model) instead.",
    )


def count_for(parameter: torch.Tensor, group: dict[str, Any], key: str, value: torch.Tensor) -> Any:
    """A 0-dim entry as an optimizer keeps it for a parameter; where, as `Optimizer.load_state_dict` decides it.

    A step count stays on the CPU, so that nobody waits for a GPU to read it, unless the step is one kernel there.
    """
    if value.dtype == torch.int64:
        return int(value)
    on_cpu = key == STEP and not group.get("capturable") and not group.get("fused")
    return value.to("cpu" if on_cpu else parameter.device, copy=True)


def group_by_parameter(optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, Any]]:
    """Identity of a parameter -> its group."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {id(parameter): group for group in groups for parameter in group["params"]}


def require_named(optimizer: torch.optim.Optimizer | None, module: torch.nn.Module) -> None:
    """Raise UsageOnRankError where an optimizer holds parameters that the model does not have, and no name for."""
    known = {id(parameter) for parameter in module.parameters()}
    strangers = sum(identity not in known for identity in group_by_parameter(optimizer))
    if strangers:
        raise UsageOnRankError(
            f"The optimizer holds {strangers} parameters that are not those of this {type(module).__name__}",
            "Put them into the module that ddl.prepare is given.",
        )


class KeptByParameter(Prepared):
    """`entries`, `gather` and `put` over `module` and `optimizer`; a strategy that splits tensors says how.

    It overrides `whole_shape`, `join` and `cut`; by default every rank holds all parameters whole.
    """

    training: Training
    _named: dict[str, torch.Tensor] | None = None
    """Of the last `entries`."""

    def whole_shape(self, tensor: torch.Tensor) -> torch.Size:
        """Whole shape of a parameter or buffer of the module."""
        return tensor.shape

    def join(self, tensor: torch.Tensor, value: torch.Tensor, to: int) -> torch.Tensor | None:
        """`value`, which is shared out as the parameter or buffer `tensor` is, whole on the CPU of rank `to`."""
        rank = self.strategy.world.rank
        if isinstance(tensor, torch.nn.Parameter) or self.strategy.alone:
            return value.detach().to("cpu", copy=True) if rank == to else None
        # Running statistics differ between ranks: rank 0's are the model's, as DDP sees it.
        pieces = [Piece(0, 0, value.numel())]
        device = self.strategy.world.device
        whole = collect(pieces, value.reshape(-1), numel=value.numel(), rank=rank, to=to, device=device)
        return whole.view(value.shape) if whole is not None else None

    def cut(self, tensor: torch.Tensor, whole: Whole) -> torch.Tensor:
        """What this rank holds of a whole tensor that is shared out as the parameter or buffer `tensor` is."""
        return whole[...]

    def entries(self) -> list[Entry]:
        self._named = first_names(self.module)
        require_named(self.optimizer, self.module)
        return [*self._weights(), *self._states()]

    def _weights(self) -> Iterator[Entry]:
        assert self._named is not None
        for name, tensor in self._named.items():
            yield Entry(name, WEIGHT, tuple(self.whole_shape(tensor)), tensor.dtype)

    def _states(self) -> Iterator[Entry]:
        if self.optimizer is None:
            return
        assert self._named is not None
        for name, tensor in self._named.items():
            if tensor not in self.optimizer.state:  # by identity; reading it would make an empty one
                continue
            for key, part in self.optimizer.state[tensor].items():
                if part is not None:
                    value = as_tensor(part, self.optimizer, key)
                    shape = self.whole_shape(tensor) if value.shape == tensor.shape else value.shape
                    yield Entry(name, key, tuple(shape), value.dtype)

    def gather(self, entry: Entry, to: int) -> torch.Tensor | None:
        assert self._named is not None, "entries come first"
        tensor = self._named[entry.name]
        if entry.kind == WEIGHT:
            return self.join(tensor, tensor.detach(), to)
        assert self.optimizer is not None
        value = as_tensor(self.optimizer.state[tensor][entry.kind], self.optimizer, entry.kind)
        if value.shape == tensor.shape and entry.shape:
            return self.join(tensor, value, to)
        return value.detach().to("cpu", copy=True) if self.strategy.world.rank == to else None

    @torch.no_grad()
    def put(self, items: Iterable[tuple[Entry, Whole]]) -> tuple[str, ...]:
        named = first_names(self.module)
        groups = group_by_parameter(self.optimizer)
        alike: dict[str, bool] = {}
        for entry, whole in items:
            tensor = named[entry.name]
            if entry.kind in (WEIGHT, MASTER):  # a master is the same weight, and more exact where this one is fp32
                value = self.cut(tensor, whole)
                tensor.copy_(value)
                alike[entry.name] = value.dtype == tensor.dtype
            elif id(tensor) in groups:
                self._put_state(tensor, groups[id(tensor)], entry, whole, as_saved=alike.get(entry.name, False))
        self.looks.at("put", self.measure)
        return ()

    def _put_state(
        self, parameter: torch.Tensor, group: dict[str, Any], entry: Entry, whole: Whole, *, as_saved: bool
    ) -> None:
        """`as_saved`: the weight had the same dtype, so that its state keeps the one that it had.

        Else it takes on the parameter's, as in `Optimizer.load_state_dict`.
        """
        assert self.optimizer is not None
        state = self.optimizer.state[parameter]
        if not entry.shape:
            state[entry.kind] = count_for(parameter, group, entry.kind, whole[...])
            return
        value = self.cut(parameter, whole) if entry.shape == tuple(self.whole_shape(parameter)) else whole[...]
        dtype = value.dtype if as_saved or not value.is_floating_point() else parameter.dtype
        like = parameter if value.shape == parameter.shape else value
        state[entry.kind] = torch.empty_like(like, dtype=dtype, device=parameter.device).copy_(value)

    def resume_at(self, steps: int) -> None:
        self.updates.count_on(steps)
        if self.optimizer is not None and type(self.optimizer).__name__ not in FROM_THE_START:
            self.optimizer.state.clear()
