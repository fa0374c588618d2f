"""Which samples of each global batch a rank computes: one order for all ranks, cut into one slice for each.

The order is that of the user's own sampler, drawn from a seed and the number of the epoch and so the same at any
number of ranks. Slices of a batch that does not divide evenly differ by one sample; how much each counts in the mean
is known from its size alone, and no rank asks another. Limits: the dataset and the sampler must be the same on every
rank.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Share:
    """What one batch of this rank is of its global batch, and where in the epoch it stands."""

    index: int = 0
    """Number of the batch in its epoch, from 0."""
    last: bool = False
    """The last batch of its epoch."""
    length: int | None = None
    """Batches in the epoch; None where nobody knows before it ends."""
    samples: int | None = None
    """Samples of the global batch on this rank; 0: it repeats one that another rank has. None: not ours to know."""
    weight: float = 1.0
    """What a mean over this rank's samples must be multiplied by for the mean over ranks to be the global mean."""


def cut(batch: Sequence[Any], rank: int, size: int) -> tuple[list[Any], Share]:
    """Slice `rank` of `size` slices of a global batch; contiguous, so that slices in order are the batch again.

    A rank that gets nothing repeats the batch's first sample with weight 0, so that it comes to every collective.
    """
    start, stop = rank * len(batch) // size, (rank + 1) * len(batch) // size
    share = Share(samples=stop - start, weight=(stop - start) * size / len(batch))
    return list(batch[start:stop]) or [batch[0]], share


def pick(group: Sequence[list[Any]], rank: int, size: int) -> tuple[list[Any], Share]:
    """Batch `rank` of a group of up to `size` batches that one step takes together."""
    total = sum(len(batch) for batch in group)
    if rank < len(group):
        return group[rank], Share(samples=len(group[rank]), weight=len(group[rank]) * size / total)
    return group[0][:1], Share(samples=0, weight=0.0)


class RankBatches(Sampler[list[Any]]):
    """Batch sampler of one rank: its slice of every global batch, in the one order.

    Parameters
    ----------
    loader
        The user's map-style loader.
    rank, size
        Which slice of how many.
    seed
        Of the order, where the user gave no generator.
    per_rank
        The loader's batch size is one rank's, so that a global batch is `size` times as large.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, size: int, seed: int, *, per_rank: bool) -> None:
        self._rank, self._size, self._seed = rank, size, seed
        self._batch_size = loader.batch_size
        if self._batch_size is None:
            self._order: Any = loader.batch_sampler
        else:
            self._order = loader.sampler
        self._grouped = per_rank and self._batch_size is None
        if self._batch_size is not None and per_rank:
            self._batch_size *= size
        self._drop_last = loader.drop_last
        self.epoch = 0
        self.done = 0
        """Items of the order that iterators pass over; a loader with workers makes two of them, and uses the later."""
        self.shares: deque[Share] = deque()
        """Of the batches that the latest iterator gave out and the loader has not delivered yet."""

    def __len__(self) -> int:
        return self.left(0)

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed

    @property
    def items(self) -> int:
        """Items of the order in an epoch; TypeError where the sampler does not tell.

        An item is a sample, or a batch where the user's own batch sampler makes them.
        """
        return len(self._order)

    @property
    def items_of_batch(self) -> int:
        """Items of the order in a global batch."""
        return self._batch_size or (self._size if self._grouped else 1)

    def left(self, done: int) -> int:
        """Global batches of an epoch after so many items of the order."""
        left = max(self.items - done, 0)
        drops = self._drop_last and self._batch_size is not None
        return left // self.items_of_batch if drops else -(-left // self.items_of_batch)

    def __iter__(self) -> Iterator[list[Any]]:
        self.shares = deque()
        return self._batches(self.epoch, self.done, self.shares)

    def _batches(self, epoch: int, done: int, shares: deque[Share]) -> Iterator[list[Any]]:
        for batch in self._global_batches(epoch, done):
            samples, share = (pick if self._grouped else cut)(batch, self._rank, self._size)
            shares.append(share)
            yield samples

    def _global_batches(self, epoch: int, done: int) -> Iterator[list[Any]]:
        order = itertools.islice(_in_order(self._order, self._seed, epoch), done, None)
        if self._batch_size is None and not self._grouped:
            yield from (list(batch) for batch in order)
            return
        size = self._size if self._grouped else self._batch_size
        while batch := list(itertools.islice(order, size)):
            if self._drop_last and len(batch) < (size or 1):
                return
            yield batch


def _in_order(sampler: Any, seed: int, epoch: int) -> Iterator[Any]:
    """Iterate a sampler in the order that `seed` and `epoch` give, the same on every rank."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if isinstance(sampler, SequentialSampler):
        return iter(sampler)
    if type(sampler) is RandomSampler:
        # A generator that the user gave says which order is wanted; it may have been used up differently by now.
        base = seed if sampler.generator is None else sampler.generator.initial_seed()
        generator = torch.Generator().manual_seed(mix(base, epoch))
        copy = RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples, generator)
        return iter(copy)
    return _with_own_randomness(sampler, mix(seed, epoch))


def mix(seed: int, number: int) -> int:
    """Seed of one epoch, or of one rank's workers; neighbouring seeds must not share them."""
    return (seed * 1_000_003 + number) % 2**63


def _with_own_randomness(sampler: Iterable[Any], seed: int) -> Iterator[Any]:
    """Iterate a sampler that we do not know as if the process had been seeded just for it.

    Whatever it draws from, it then draws the same on every rank, and the ranks' own random state is not moved.
    """
    with own_randomness():
        seed_all(seed)
        iterator = iter(sampler)
        state = random_state()
    while True:
        with own_randomness():
            set_random_state(state)
            try:
                item = next(iterator)
            except StopIteration:
                return
            state = random_state()
        yield item


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch (every device of it)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - programs in cells draw from the global generator
    torch.manual_seed(seed)


def random_state() -> tuple[Any, ...]:
    """State of the generators of Python, NumPy and torch's CPU."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - as above


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put back what `random_state` gave."""
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002 - as above
    torch.set_rng_state(state[2])


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Leave the generators as they were found, the GPU's too where it was started."""
    state = random_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        set_random_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
