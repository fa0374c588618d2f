"""A model in a DeepSpeed engine, as the context drives it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies import zero_config, zero_library, zero_shards, zero_share, zero_whole
from ddl_magics.strategies.common import (
    autocast,
    broadcast_from_rank_zero,
    bytes_by_kind,
    cast_parameters,
    drop_gradients,
    note_on_groups,
    refuse_by_matrix,
    release,
    require_free,
    required_optimizer,
    state_tensors,
)
from ddl_magics.strategies.kept import require_named
from ddl_magics.strategies.zero_state import KeptInShards

if TYPE_CHECKING:
    from ddl_magics.strategies.base import Training
    from ddl_magics.strategies.zero import Zero

WEIGHTS = 3
"""The stage that shards the parameters themselves."""


class ZeroPrepared(KeptInShards):
    """The user's optimizer works inside DeepSpeed's, on this rank's shard; its `param_groups` stay the user's."""

    strategy: Zero

    def __init__(
        self, strategy: Zero, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, training: Training
    ) -> None:
        require_free(module, sharded="zero:3" if strategy.stage == WEIGHTS else "")
        _refuse_optimizer(optimizer)
        require_named(optimizer, module)  # DeepSpeed fails on a parameter without a name
        zero_library.forget_old_world()
        self.strategy = strategy
        self.module = module
        self.optimizer = optimizer
        self.training = training
        self.groups = optimizer.param_groups if optimizer else []
        self.members = [list(group["params"]) for group in self.groups]
        self.notes = note_on_groups(optimizer, sharded=any(map(zero_shards.is_sharded, module.parameters())))
        self._place()
        self.parameters = list(module.parameters())
        self.config = zero_config.build(
            strategy.spec,
            training,
            numel=sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in self.parameters),
            world_size=strategy.world.world_size,
            cuda=torch.device(strategy.world.device).type == "cuda",
        )
        self.default_norm = float(self.config.get("gradient_clipping", 0.0))
        self.engine: Any = None
        if optimizer is None and strategy.stage != WEIGHTS:  # nothing to shard: stages 1 and 2 are about training
            broadcast_from_rank_zero(self.parameters)
            return
        self._start()

    def _start(self) -> None:
        """Make the engine; a collective."""
        self.engine = zero_library.initialize(self.module, self.optimizer, self.config)
        if self.optimizer is None:
            return
        zero_library.drop_second_copy(self.engine.optimizer)
        if self.strategy.stage == 1:
            zero_library.before_reduction(self.engine, self._look_before_reduction)
        # DeepSpeed steps once for each group of its own, and tells the weights to the other ranks after the last.
        self.updates.watch(self.engine.optimizer.optimizer, parts=len(zero_library.masters(self.engine.optimizer)))

    def _look_before_reduction(self) -> None:
        """See all gradients, which stage 1 holds until the end of `backward`; after that it has its share of them."""
        self.looks.at("reduction", self.measure)

    def _place(self) -> None:
        """Put the module on the device, in its precision, the same on every rank."""
        module, device = self.module, self.strategy.world.device
        cast_parameters(module, self.training.precision)
        if self.strategy.stage == WEIGHTS:
            if self.training.precision == "bf16-true":
                zero_shards.cast_shards(module, torch.bfloat16)
            zero_shards.shard(module, offload=self.strategy.spec.option("offload_param") is not None)
            for buffer in module.buffers():
                buffer.data = buffer.data.to(device)
        else:
            module.to(device)  # DeepSpeed broadcasts parameters, not buffers
        broadcast_from_rank_zero(module.buffers())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine is None:
            with autocast(self.strategy.world.device, self.training.precision):
                return self.module(*args, **kwargs)
        with self._linear():
            output = self.engine(*args, **kwargs)  # under its own autocast, see zero_config
        if not torch.is_grad_enabled():
            self._settle()
        return output

    def _settle(self) -> None:
        """Be whole, or shards, and nothing in between."""
        if self.engine is not None:
            zero_library.settle(self.engine)

    def backward(self, loss: torch.Tensor, boundary: bool) -> None:
        required_optimizer(self)
        self.engine.set_gradient_accumulation_boundary(boundary)
        with self._linear():  # activation checkpointing runs the forward again
            self.engine.backward(loss)
        self.looks.at("backward", self.measure)

    def step(self, max_norm: float | None) -> float | torch.Tensor | None:
        optimizer = required_optimizer(self)
        self.engine.optimizer.clip_grad = self.default_norm if max_norm is None else max_norm
        try:
            self.engine.step()
        finally:
            optimizer.param_groups = self.groups  # DeepSpeed leaves a list of one of them where a group fails
        self.looks.at("step", self.measure)
        norm: float | torch.Tensor | None = self.engine.get_global_grad_norm()
        return norm

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        self._settle()
        return zero_shards.full_state(self.module)

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._settle()
        zero_shards.load_full_state(self.module, state)
        if self.engine is not None and self.optimizer is not None:
            self.engine.optimizer.refresh_fp32_params()

    def sync_generate(self) -> bool:
        return self.strategy.stage == WEIGHTS

    @property
    def can_be_whole(self) -> bool:
        return self.strategy.stage == WEIGHTS

    def inference(self, *, whole: bool) -> AbstractContextManager[None]:
        self._settle()
        return zero_whole.whole(self.module, self.engine) if whole else nullcontext()

    def measure(self) -> dict[str, int]:
        engine, trains = self.engine, self.optimizer is not None
        inner = engine.optimizer if engine is not None and trains else None
        return bytes_by_kind(
            parameters=[t for p in self.parameters for t in (p.data, getattr(p, "ds_tensor", None))],
            gradients=[*(p.grad for p in self.parameters), *(zero_library.gradients(inner) if inner else ())],
            optimizer=[*state_tensors(inner.optimizer), *zero_library.masters(inner)] if inner else (),
        )

    def rebind(self) -> None:
        """Make the engine anew, with this rank's share of the optimizer; see `zero_share`."""
        if self.engine is None:
            drop_gradients(self.module, self.optimizer)
            return
        share = zero_share.Share.of(self.engine) if self.optimizer is not None else None
        self._end()
        with zero_share.own_weights():
            self._start()
        if share is not None:
            share.give_back(self.engine)

    def close(self) -> None:
        self.updates.forget()
        release(self)
        if self.engine is not None:
            self._end()

    def _end(self) -> None:
        """Let the engine go, and give the optimizer its own parameters back in the place of DeepSpeed's flat shards."""
        zero_library.destroy(self.engine)
        self.engine = None
        if self.optimizer is not None:
            self.optimizer.state.clear()
            for group, members in zip(self.groups, self.members, strict=True):
                group["params"] = members

    def _linear(self) -> AbstractContextManager[None]:
        sharded = self.strategy.stage == WEIGHTS and self.engine is not None
        return zero_library.linear_that_regathers() if sharded else nullcontext()


def _refuse_optimizer(optimizer: torch.optim.Optimizer | None) -> None:
    """Raise UsageOnRankError for an optimizer that would silently train otherwise, or not at all, on flat shards."""
    if optimizer is None:
        return
    refuse_by_matrix(optimizer, "ZeRO gives it flat shards")
    kind = type(optimizer).__name__
    if optimizer.state:
        message = f"This {kind} holds state already (of steps, or made with it), which is not of ZeRO's shards"
        raise UsageOnRankError(message, "Make it anew before ddl.prepare, or take one such as AdamW or SGD.")
    for index, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            message = f"Group {index} of this {kind} is empty, which ZeRO cannot shard"
            raise UsageOnRankError(message, "Leave that group out of the optimizer.")
        # DeepSpeed fails on such a group, and dropping it would put a scheduler's groups out of step.
        if not any(parameter.requires_grad for parameter in group["params"]):
            message = f"Group {index} of this {kind} holds only frozen parameters, which ZeRO cannot shard"
            raise UsageOnRankError(message, "Leave that group out of the optimizer.")
