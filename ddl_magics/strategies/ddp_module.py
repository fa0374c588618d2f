"""A model in PyTorch's DistributedDataParallel, as the context drives it.

DDP decides in the forward whether gradients will travel (`no_sync`); our caller says so in the backward, when it
knows whether the batch was the last one. So the forward always runs as under `no_sync`, and at a boundary the
reducer is armed just before the backward, as Lightning does for manual optimisation
(`lightning.pytorch.overrides.distributed.prepare_for_backward`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddl_magics.strategies.common import ModulePrepared, autocast, broadcast_from_rank_zero

if TYPE_CHECKING:
    from ddl_magics.strategies.base import Strategy, Training


class DDPPrepared(ModulePrepared):
    """DDP broadcasts parameters and buffers from rank 0 when it is made, and averages gradients at boundaries."""

    def __init__(
        self,
        strategy: Strategy,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        training: Training,
        *,
        find_unused: bool,
    ) -> None:
        super().__init__(strategy, module, optimizer, training)
        self.find_unused = find_unused
        self.ddp: DistributedDataParallel | None = None
        if not any(parameter.requires_grad for parameter in module.parameters()):  # DDP refuses such a model
            broadcast_from_rank_zero([*module.parameters(), *module.buffers()])
            return
        device = torch.device(strategy.world.device)
        self.ddp = DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=True,
        )
        self.ddp.require_backward_grad_sync = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Evaluation uses no bucket, and may run on some of the ranks only: it must not meet DDP's broadcast of buffers.
        forward = self.ddp if self.ddp is not None and torch.is_grad_enabled() else self.module
        with autocast(self.strategy.world.device, self.training.precision):
            return forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor, boundary: bool) -> None:
        if boundary and self.ddp is not None:
            self.ddp.require_forward_param_sync = True  # the next forward takes rank 0's buffers
            self.ddp.reducer.prepare_for_backward([loss] if self.find_unused else [])
        super().backward(loss, boundary)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        # Where gradients may be absent on some steps they are dropped, so that the optimizer skips those parameters as
        # it does in one process; else they stay in DDP's buckets and are zeroed, which saves a second copy of all
        # gradients while they accumulate.
        optimizer.zero_grad(set_to_none=self.find_unused)
        self.module.zero_grad(set_to_none=self.find_unused)

    def close(self) -> None:
        super().close()
        self.ddp = None
