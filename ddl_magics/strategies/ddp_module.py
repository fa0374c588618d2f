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
        self.ddp = self._wrap(same_start=True)

    def _wrap(self, *, same_start: bool) -> DistributedDataParallel:
        """Make the wrapper over the default group; `same_start`: with rank 0's parameters and buffers."""
        device = torch.device(self.strategy.world.device)
        ddp = DistributedDataParallel(
            self.module,
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=self.find_unused,
            gradient_as_bucket_view=True,
            init_sync=same_start,
        )
        ddp.require_backward_grad_sync = False
        return ddp

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

    def rebind(self) -> None:
        """Wrap the module anew, each rank with its own weights: ranks that differ are not made equal unseen."""
        old, self.ddp = self.ddp, None
        super().rebind()  # the gradients are views of the old wrapper's buckets
        if old is not None:
            # A traceback that is kept for the debugger may keep the old wrapper, and its hooks still expect gradients.
            old.reducer._remove_autograd_hooks()  # noqa: SLF001 - torch has no public way
            del old
            self.ddp = self._wrap(same_start=False)

    def close(self) -> None:
        super().close()
        self.ddp = None
