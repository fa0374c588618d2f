"""A model under torch's `fully_shard`, as the context drives it."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddl_magics.strategies import fsdp_optimizer, fsdp_shards, fsdp_whole
from ddl_magics.strategies.common import (
    autocast,
    broadcast_from_rank_zero,
    bytes_by_kind,
    drop_gradients,
    refuse_by_matrix,
    release,
    require_free,
    required_optimizer,
    state_tensors,
)
from ddl_magics.strategies.kept import KeptByParameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddl_magics.strategies.base import Training, Whole
    from ddl_magics.strategies.fsdp import FSDP


class FSDPPrepared(KeptByParameter):
    """The user's optimizer holds this rank's rows. Ranks call forward, backward and step together."""

    strategy: FSDP

    def __init__(
        self, strategy: FSDP, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, training: Training
    ) -> None:
        require_free(module, sharded="fsdp")
        refuse_by_matrix(optimizer, "fsdp gives it rows", fit=("Muon",))  # which gathers what it needs, through DTensor
        self.strategy = strategy
        self.module = module
        self.optimizer = optimizer
        self.training = training
        for buffer in module.buffers():
            buffer.data = buffer.data.to(strategy.world.device)
        broadcast_from_rank_zero(module.buffers())
        self._shard(torch.bfloat16 if training.precision == "bf16-true" else None)
        if optimizer is not None:
            self.updates.watch(optimizer)

    def _shard(self, dtype: torch.dtype | None = None) -> None:
        """From whole parameters, or from rows of any mesh, to rows over the present one, under torch's hooks."""
        strategy, module = self.strategy, self.module
        working = strategy.world.device
        successors = fsdp_shards.distribute(
            module, strategy.mesh, "cpu" if strategy.offload else working, working, dtype
        )
        if self.optimizer is not None:
            fsdp_optimizer.move(self.optimizer, successors, strategy.mesh)
        low_precision = self.training.precision == "bf16-mixed"
        fsdp_shards.shard(module, strategy.mesh, offload=strategy.offload, low_precision=low_precision)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with autocast(self.strategy.world.device, self.training.precision):
            output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            fsdp_shards.reshard(self.module)  # torch keeps the root's part for a backward, which does not come
        return output

    def backward(self, loss: torch.Tensor, boundary: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.looks.at("backward", self.measure)

    def step(self, max_norm: float | None) -> torch.Tensor | None:
        optimizer = required_optimizer(self)
        fsdp_shards.reshard(self.module)  # what is gathered would stay as it was before the update
        norm = self._clip(max_norm) if max_norm is not None else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.module.zero_grad(set_to_none=True)
        self.looks.at("step", self.measure)
        return norm

    @torch.no_grad()
    def _clip(self, max_norm: float) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, over the rows of all ranks; returns the norm before."""
        gradients = self._gradients()
        device = gradients[0].device if gradients else torch.device(self.strategy.world.device)
        square = torch.zeros((), device=device)
        for gradient in gradients:
            square += torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        dist.all_reduce(square)
        norm = square.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def _gradients(self) -> list[torch.Tensor]:
        """Of this rank's rows."""
        return [fsdp_shards.local(p.grad) for p in fsdp_shards.shards(self.module) if p.grad is not None]

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return fsdp_shards.full_state(self.module)

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        fsdp_shards.load_full_state(self.module, state)

    def join(self, tensor: torch.Tensor, value: torch.Tensor, to: int) -> torch.Tensor | None:
        if fsdp_shards.is_sharded(value):
            return fsdp_shards.join(value, to, self.strategy.world.device)
        return super().join(tensor, value, to)

    def cut(self, tensor: torch.Tensor, whole: Whole) -> torch.Tensor:
        if fsdp_shards.is_sharded(tensor):
            return fsdp_shards.cut(whole, self.strategy.mesh, fsdp_shards.local(tensor).device)
        return super().cut(tensor, whole)

    def sync_generate(self) -> bool:
        return True

    @property
    def can_be_whole(self) -> bool:
        return True

    @contextmanager
    def inference(self, *, whole: bool) -> Iterator[None]:
        with fsdp_whole.whole(self.module) if whole else nullcontext():
            try:
                yield
            finally:
                fsdp_shards.reshard(self.module)  # torch keeps the root's part for a backward, which does not come

    def measure(self) -> dict[str, int]:
        parameters = map(fsdp_shards.local, fsdp_shards.shards(self.module))
        return bytes_by_kind(
            parameters=[*parameters, *fsdp_shards.gathered(self.module)],
            gradients=self._gradients(),
            optimizer=map(fsdp_shards.local, state_tensors(self.optimizer)),
        )

    def rebind(self) -> None:
        """Lay torch's hooks anew, over the new mesh: those of a step that broke off are half-way through it."""
        drop_gradients(self.module, self.optimizer)
        fsdp_shards.rest(self.module)
        self._shard()

    def close(self) -> None:
        self.updates.forget()
        release(self)
        fsdp_shards.rest(self.module)
