"""Parameters that `fully_shard` shards, whole on every rank for as long as many forwards need them.

Torch gathers block by block and frees after each, in every forward: text that is generated would bring all weights over
the network for each token. `whole` gathers once; torch's hooks find everything there.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Within it every parameter of `module` is whole on this rank, under no_grad only.

    Entering is a collective; memory: the whole model, in the dtype that it computes in.
    """
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    try:
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not module, recurse=False)  # as `fully_shard` sets it
            part.reshard()
