"""A model on the meta device becomes one whose parameters are DeepSpeed's shards, one parameter after the other.

Rank 0 reads a parameter whole, `zero.Init` sends it to the others, each keeps its part, and the next one follows: no
rank ever has more than one of them whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ddl_magics.strategies import zero_shards
from ddl_magics.strategies.homes import names_on_meta, read_buffers, replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.strategies.base import Whole


def materialise(module: nn.Module, read: Callable[[str], Whole], *, offload: bool) -> None:
    """Shard a model over all ranks, with the weights that `read` gives on rank 0; a collective."""
    from deepspeed import zero

    on_meta = names_on_meta(module)
    names: dict[nn.Parameter, str] = {}

    def stand_in(old: nn.Parameter) -> nn.Parameter | None:
        """Of the same dtype on the host, without an element: a parameter on the meta device can take no data."""
        if old not in on_meta:
            return None
        new = nn.Parameter(torch.empty(0, dtype=old.dtype), requires_grad=old.requires_grad)
        names[new] = on_meta[old]
        return new

    class Filled(zero.Init):
        """Fills each parameter just before it is shared out."""

        def _zero_init_param(self, parameter: Any) -> None:
            if parameter in names:
                whole = read(names[parameter])
                values = whole[...] if dist.get_rank() == 0 else torch.empty(whole.shape)
                parameter.data = values.to(self.local_device, parameter.dtype)
            super()._zero_init_param(parameter)

    replace(module, stand_in)
    zero_shards.shard([module], offload=offload, by=Filled)
    read_buffers(module, read)
