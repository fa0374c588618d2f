"""A loader on one rank: its slice of every global batch, and the end of the epoch at the same batch on all ranks.

A map-style `DataLoader` is made anew over the same dataset with a batch sampler of ours (`rank.batches`). An iterable
one is left alone, since only its author knows how to split it: every rank asks the others before each batch whether
they have one too, one all_reduce of one number on the CPU (about 0.1 ms on a host), so that the epoch ends for all
instead of hanging.

Its `bookmark` knows how far the training is in a loader, and lets it go on there after a load. Limits: workers that
deliver out of order are put in order; subclasses that iterate in their own way are left alone too, and a loader that
is left alone reads again, and drops, what was done of its epoch; random numbers that a dataset draws in a worker
process begin anew after a load.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank.batches import RankBatches, Share, mix
from ddl_magics.rank.position import Bookmark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_turns = itertools.count(1)
BATCHES = ("global", "per-rank")
"""What a loader's batch size counts: the samples of all ranks together, or those of one."""


def split(
    loader: DataLoader[Any],
    *,
    rank: int,
    size: int,
    seed: int,
    batch: str,
    note: Callable[[str], object],
) -> RankLoader:
    """Give this rank's part of a loader, the same kind of object: `rank` of `size` slices.

    Raises
    ------
    UsageOnRankError
        The loader is one of ours already, or `batch` is neither `global` nor `per-rank`.
    """
    if isinstance(loader, RankLoader):
        raise UsageOnRankError("This loader is prepared already", "Give prepare the loader that it was made from.")
    if batch not in BATCHES:
        raise UsageOnRankError(f"There is no batch={batch!r}", f"Valid: {', '.join(BATCHES)}.")
    reason = _left_alone(loader)
    if reason:
        if size > 1:
            note(f"A loader is left alone: {reason}. Each of the {size} ranks reads what it yields there.")
        return RankLoader(loader, None, size, mix(seed, rank), note)
    batches = RankBatches(loader, rank, size, seed, per_rank=batch == "per-rank")
    if batch == "global" and loader.batch_size is not None and loader.batch_size < size:
        note(f"A global batch of {loader.batch_size} on {size} ranks leaves some without a sample: they repeat one.")
    return RankLoader(loader, batches, size, mix(seed, rank), note)


def _left_alone(loader: DataLoader[Any]) -> str:
    """Why a loader cannot be split, or an empty text."""
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is iterable, and only you know how to split it (by ddl.rank and ddl.world_size)"
    if loader.batch_size is None and loader.batch_sampler is None:
        return "it does not batch (batch_size=None)"
    if isinstance(loader.sampler, DistributedSampler):
        return "its DistributedSampler splits it already, so that its batch size is one rank's"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} iterates in its own way"
    return ""


class RankLoader(DataLoader[Any]):
    """What `prepare` makes of a `DataLoader`. While it is iterated, `share` tells what the latest batch is.

    `batches` None: the loader is left alone. Its epochs are counted from the first `iter`.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: RankBatches | None,
        size: int,
        worker_seed: int,
        note: Callable[[str], object],
    ) -> None:
        self.source = loader
        self.batches = batches
        self.share: Share | None = None
        self.turn = 0
        """Which of all prepared loaders gave out a batch last: the one with the highest."""
        self.bookmark = Bookmark(batches)
        self._note = note
        self._ends_together = batches is None and size > 1
        generator = loader.generator
        if generator is None:
            # Else each epoch would draw the seed of its workers from the state that the user's own code draws from.
            generator = torch.Generator().manual_seed(worker_seed)
        order = _own_order(loader) if batches is None else {"batch_sampler": batches}
        super().__init__(
            loader.dataset,
            **order,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._iterate(self.bookmark.begin())

    def _iterate(self, epoch: int) -> Iterator[Any]:
        done, _ = self.bookmark.done(epoch)
        batches = self._start(epoch)
        given = self.batches.shares if self.batches is not None else None  # those of the iterator just made
        length = self.bookmark.length(epoch)
        if self.batches is None and not all(self._next(batches) for _ in range(done)):
            return
        # Where nobody knows the length, one batch is fetched ahead, so that the last one is known as such.
        ahead = self._next(batches) if length is None else None
        try:
            for index in itertools.count(done):
                if length is None:
                    batch, ahead = ahead, self._next(batches) if ahead is not None else None
                else:
                    batch = self._next(batches)
                if batch is None:
                    return
                last = ahead is None if length is None else index == length - 1
                share = given.popleft() if given is not None else Share()
                self.share = dataclasses.replace(share, index=index, length=length, last=last)
                self.turn = next(_turns)
                self.bookmark.give(epoch, index + 1, last=last)
                yield batch[0]
        finally:
            self.share = None
            self.bookmark.running = False

    def _start(self, epoch: int) -> Iterator[Any]:
        if self.batches is not None:
            self.batches.epoch = epoch
            _, self.batches.done = self.bookmark.done(epoch)
        holders: list[Any] = [self.dataset, self.source.sampler if self.batches is None else None]
        for holder in holders:
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)
        own_way = type(self.source).__iter__ is not DataLoader.__iter__
        return iter(self.source) if own_way else super().__iter__()

    def _next(self, batches: Iterator[Any]) -> tuple[Any] | None:
        """Return the next batch in a tuple; None at the end of the epoch, which comes when any rank has no more."""
        batch = next(((item,) for item in batches), None)
        if not self._ends_together:
            return batch
        mine = torch.tensor([float(batch is not None)])
        most = mine.clone()
        dist.all_reduce(mine, op=dist.ReduceOp.MIN)
        if mine.item() == 1:
            return batch
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if most.item() == 1:
            self._note("The ranks have different numbers of batches: the epoch ends for all with the shortest.")
        return None


def _own_order(loader: DataLoader[Any]) -> dict[str, Any]:
    """Arguments that say how a loader batches, taken over as they are."""
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    return {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "sampler": loader.sampler}
