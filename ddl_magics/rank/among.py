"""The context's calls between ranks: gather, mean, barrier, one after the other; `together` does them."""

from __future__ import annotations

import builtins
import contextlib
from typing import TYPE_CHECKING, Any

from ddl_magics.rank import data, group, together
from ddl_magics.rank.scope import Scope

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class Among(Scope):
    """One rank among the others."""

    def all_gather(self, value: Any) -> list[Any]:
        """Values of all ranks in rank order: tensors of any shapes, or anything that pickles; a collective."""
        return together.all_gather(value)

    def all_reduce_mean(self, value: float | torch.Tensor) -> float | torch.Tensor:
        """Mean over ranks of a number or tensor; a collective."""
        return together.all_reduce_mean(value)

    def gather_for_metrics(self, value: Any) -> Any:
        """Results of a batch from all ranks, concatenated along dimension 0, no sample twice; a collective."""
        running = [
            loader for training in self._models.live() for loader in training.loaders if loader.share is not None
        ]
        tracked = self._tracker.items if self._tracker is not None else None
        if isinstance(tracked, data.RankLoader) and tracked.share is not None:
            running.append(tracked)
        share = max(running, key=lambda loader: loader.turn).share if running else None
        return together.gather_for_metrics(value, self._strategy().data_rank, share is not None and share.samples == 0)

    def barrier(self) -> None:
        """Wait for every rank."""
        together.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only."""
        if self.rank == 0:
            builtins.print(*values, **options)  # noqa: T201 - this is what it is for

    @contextlib.contextmanager
    def first(self, local: bool = False) -> Iterator[None]:
        """Let rank 0 (`local`: the first rank of each node) through the block before the others, however long.

        When the first one raises, the others raise too.
        """
        self._firsts += 1
        key = f"first/{self._request.run}/{self._request.cell}/{self._firsts}"
        others = self.world_size - 1
        goes_first = self.rank == 0
        if local:
            key = f"{key}/{self.world.node_rank}"
            others = self.world.local_world_size - 1
            goes_first = self.world.local_rank == 0
        if others == 0:
            yield
            return
        with together.in_turn(group.shared_store(), key, goes_first=goes_first, others=others):
            yield
