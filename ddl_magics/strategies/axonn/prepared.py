"""A model split over a grid, with its optimizer: forward, backward and step under AxoNN.

Import after `adapter.load`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from axonn.intra_layer import optimize_communication, overlap_all_gathers_for_checkpointed_forward

from ddl_magics.strategies.axonn import shard, state, sync
from ddl_magics.strategies.axonn.groups import forget_overlap
from ddl_magics.strategies.common import (
    ModulePrepared,
    cast_parameters,
    note_on_groups,
    require_free,
    required_optimizer,
)
from ddl_magics.strategies.recompute import does_it_itself

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddl_magics.strategies.axonn import AxoNN
    from ddl_magics.strategies.axonn.groups import Groups
    from ddl_magics.strategies.base import Entry, Training, Whole


class AxoNNPrepared(ModulePrepared):
    """What `AxoNN.prepare` returns. Ranks of a grid call it together, also in inference."""

    _homes: state.Homes
    """Of the last `entries` or `put`."""

    def __init__(
        self,
        strategy: AxoNN,
        groups: Groups,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        training: Training,
    ) -> None:
        self.groups = groups
        self.overlap = strategy.spec.option("overlap") == "1"
        require_free(model)
        shard.refuse_foreign(model, groups)
        shard.refuse_by_matrix(optimizer, groups.grid.text)
        cast_parameters(model, training.precision)
        notes = note_on_groups(optimizer, sharded=any(True for _ in shard.parallel_layers(model)))
        module, successors = shard.split_model(model, groups, strategy.world.device)
        if optimizer is not None:
            shard.split_optimizer(optimizer, successors)
        super().__init__(strategy, module, optimizer, training)
        if optimizer is not None:
            shard.place_state(optimizer)
        self.notes = (shard.measure(module).note(groups.grid.text), *notes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._overlapping():
            return super().__call__(*args, **kwargs)

    def backward(self, loss: torch.Tensor, boundary: bool) -> None:
        with self._overlapping(backward=True):
            super().backward(loss, boundary)
        if boundary:
            sync.average_gradients(sync.kinds_of(self.module), self.groups)

    def _overlapping(self, backward: bool = False) -> AbstractContextManager[Any]:
        """AxoNN's overlap of communication with computation, as its Lightning strategy sets it up; off by default.

        Where activations are computed again the sum of a weight's gradient is not overlapped: AxoNN adds it later to
        the weight that the backward has saved, and the one that was saved again is no more than an alias of it.
        """
        if not self.overlap:
            return nullcontext()
        stack = ExitStack()
        stack.callback(forget_overlap)  # where a collective failed AxoNN's own end of the block breaks off
        stack.enter_context(optimize_communication(True, not self._recomputes(), True, self.module))
        if backward:
            in_reverse = torch.nn.ModuleList(list(self.module.modules())[::-1])
            stack.enter_context(overlap_all_gathers_for_checkpointed_forward(in_reverse))
        return stack

    def _recomputes(self) -> bool:
        return self.training.checkpoint_activations or any(map(does_it_itself, self.module.modules()))

    def step(self, max_norm: float | None) -> torch.Tensor | None:
        optimizer = required_optimizer(self)
        norm = None
        if max_norm is not None:
            kinds = sync.kinds_of(self.module)
            norm = sync.gradient_norm(kinds, self.groups, self.strategy.world.device)
            sync.clip_gradients(kinds, norm, max_norm)
        optimizer.step()
        self.zero_grad(optimizer)
        self.looks.at("step", self.measure)
        return norm

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return state.full_state_dict(self.module)

    def load_full_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        state.load_full_state_dict(self.module, state_dict)

    def entries(self) -> list[Entry]:
        self._homes = state.homes(self.module)
        return super().entries()

    def put(self, items: Iterable[tuple[Entry, Whole]]) -> tuple[str, ...]:
        self._homes = state.homes(self.module)
        return super().put(items)

    def whole_shape(self, tensor: torch.Tensor) -> torch.Size:
        return state.shape_of(tensor, self._homes)

    def join(self, tensor: torch.Tensor, value: torch.Tensor, to: int) -> torch.Tensor | None:
        if id(tensor) not in self._homes:
            return super().join(tensor, value, to)
        layer, name = self._homes[id(tensor)]
        return layer.join_on(name, value, to)

    def cut(self, tensor: torch.Tensor, whole: Whole) -> torch.Tensor:
        if id(tensor) not in self._homes:
            return super().cut(tensor, whole)
        layer, name = self._homes[id(tensor)]
        return layer.read(name, whole)

    def sync_generate(self) -> bool:
        return True
