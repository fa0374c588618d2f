"""A model on the meta device becomes one whose parameters are DeepSpeed's shards, one parameter after the other.

Rank 0 reads a parameter whole, `zero.Init` sends it to the others, each keeps its part, and the next one follows in the
same memory: no rank ever has more than one of them whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ddl_magics.strategies import zero_shards
from ddl_magics.strategies.homes import names_on_meta, read_buffers, replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.strategies.base import Whole


@dataclass
class Source:
    """Where the values of parameters come from."""

    read: Callable[[str], Whole]
    names: dict[nn.Parameter, str]
    room: torch.Tensor
    """For the largest of them: the heap would keep what is freed between two shards."""

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Whole on rank 0; on the others room for it, until the next is asked for."""
        whole = self.read(self.names[parameter])
        place = self.room[: torch.Size(whole.shape).numel()].view(whole.shape)
        return place.copy_(whole[...]) if dist.get_rank() == 0 else place


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

    replace(module, stand_in)
    largest = max((parameter.numel() for parameter in on_meta), default=0)
    widest = max((parameter.dtype for parameter in on_meta), key=lambda dtype: dtype.itemsize, default=None)

    class Filled(zero.Init):
        """Fills each parameter just before it is shared out."""

        source: Source | None = Source(read, names, torch.empty(largest, dtype=widest))

        def _zero_init_param(self, parameter: Any) -> None:
            if self.source is not None and parameter in self.source.names:
                parameter.data = self.source.values(parameter).to(self.local_device, parameter.dtype)
            super()._zero_init_param(parameter)

    zero_shards.shard(module, offload=offload, by=Filled)
    Filled.source = None  # the parameters keep the class
    read_buffers(module, read)
