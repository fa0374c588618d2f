"""What one rank alone knows of a model that trains under ZeRO, kept while its DeepSpeed engine is made anew.

DeepSpeed has no way to move an engine to another process group, and one whose forward, backward or step broke off
holds half-filled buckets, hooks and handles of collectives that never end. So after a rank failed the engine is made
again, and gets the optimizer's share back: the weights that the inner optimizer updates ("master" weights; the truth
where a step broke off before it told the others) and its state.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.strategies import zero_library

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Share:
    """Share of one optimizer."""

    masters: list[torch.Tensor]
    """Flat, one for each group of DeepSpeed's; views of the weights where it keeps no second copy of them."""
    states: list[dict[str, Any]]
    """The inner optimizer's state of each."""
    counts: dict[str, int]
    """How far the engine had counted."""

    @classmethod
    def of(cls, engine: Any) -> Share:
        masters = zero_library.masters(engine.optimizer)
        state = engine.optimizer.optimizer.state
        return cls(
            [master.detach() for master in masters],
            [state.get(master, {}) for master in masters],
            {name: getattr(engine, name) for name in zero_library.COUNTS},
        )

    @torch.no_grad()
    def give_back(self, engine: Any) -> None:
        """Put the share into a new engine, and its weights into the model of every rank; a collective."""
        optimizer = engine.optimizer
        state = optimizer.optimizer.state
        state.clear()
        for master, value, kept in zip(zero_library.masters(optimizer), self.masters, self.states, strict=True):
            master.data.copy_(value)
            if kept:
                state[master] = kept
        zero_library.spread_masters(optimizer)
        for name, count in self.counts.items():
            setattr(engine, name, count)


@contextmanager
def own_weights() -> Iterator[None]:
    """Within it a new engine starts from each rank's own weights: DeepSpeed would overwrite them with rank 0's."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    broadcast = DeepSpeedEngine._broadcast_model  # noqa: SLF001 - no setting does it
    DeepSpeedEngine._broadcast_model = lambda _: None  # noqa: SLF001
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = broadcast  # noqa: SLF001
