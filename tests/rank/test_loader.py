"""One order of samples for all ranks, cut into slices."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank.batches import own_randomness
from ddl_magics.rank.data import split

SIZES = [1, 2, 3, 4]


def numbers(length):
    return torch.arange(length)


def loaders(loader, size, seed=0, batch="global", notes=None):
    notes = [] if notes is None else notes
    return [split(loader, rank=r, size=size, seed=seed, batch=batch, note=notes.append) for r in range(size)]


def epoch(loader, size, **options):
    """Global batches of one epoch, put together from the ranks' own samples."""
    return together(loaders(loader, size, **options))


def together(parts):
    iterators = [iter(part) for part in parts]
    batches = []
    while True:
        slices = [next(iterator, None) for iterator in iterators]
        if slices[0] is None:
            assert all(piece is None for piece in slices), "the ranks had different numbers of batches"
            return batches
        own = [piece.tolist() for piece, part in zip(slices, parts, strict=True) if part.share.samples]
        batches.append([number for piece in own for number in piece])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_global_batches_are_the_same_at_any_number_of_ranks(shuffle, drop_last):
    loader = DataLoader(numbers(23), batch_size=5, shuffle=shuffle, drop_last=drop_last)
    alone = epoch(loader, 1)
    assert all(epoch(loader, size) == alone for size in SIZES)
    assert [len(batch) for batch in alone] == [5, 5, 5, 5] + ([] if drop_last else [3])
    assert (alone[0] == [0, 1, 2, 3, 4]) is not shuffle


def test_every_epoch_is_shuffled_anew_and_repeatably():
    loader = DataLoader(numbers(20), batch_size=4, shuffle=True)
    parts = loaders(loader, 2)
    first, second = together(parts), together(parts)
    assert first != second
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(20))
    again = loaders(loader, 4)
    assert [together(again), together(again)] == [first, second]
    assert epoch(loader, 2, seed=1) != first


def test_a_loader_s_own_generator_says_the_order():
    def with_seed(seed):
        return DataLoader(numbers(20), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed))

    assert epoch(with_seed(5), 2) == epoch(with_seed(5), 3, seed=9)
    assert epoch(with_seed(5), 2) != epoch(with_seed(6), 2)


class PythonSampler(Sampler):
    """A user's sampler that draws from Python's own generator as it goes."""

    def __iter__(self):
        left = list(range(9))
        while left:
            yield left.pop(random.randrange(len(left)))

    def __len__(self):
        return 9


class Buckets(Sampler):
    """A user's batch sampler with batches of unequal size."""

    def __iter__(self):
        order = torch.randperm(3).tolist()
        yield from ([[0, 1, 2, 3, 4], [5, 6], [7, 8, 9, 10]][index] for index in order)

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(numbers(9), batch_size=4, sampler=PythonSampler()),
        lambda: DataLoader(numbers(9), batch_size=4, sampler=WeightedRandomSampler([1.0] * 9, 9)),
        lambda: DataLoader(numbers(50), batch_size=4, sampler=RandomSampler(range(50), num_samples=9)),
        lambda: DataLoader(numbers(9), batch_sampler=BatchSampler(RandomSampler(range(9)), 4, drop_last=False)),
        lambda: DataLoader(numbers(11), batch_sampler=Buckets()),
    ],
    ids=["python", "weighted", "subset", "batch sampler", "buckets"],
)
def test_a_user_s_sampler_is_iterated_alike_on_every_rank(loader):
    """Also when ranks have drawn different numbers before, and go on drawing in between."""

    def slices(rank, size):
        torch.manual_seed(rank)
        random.seed(rank)
        seen = []
        part = loaders(loader(), size)[rank]
        for _ in range(2):
            for batch in part:
                seen.append((batch.tolist(), part.share.samples))
                torch.rand(rank + 1)
                random.random()
        return seen

    with own_randomness():
        alone = [batch for batch, _ in slices(0, 1)]
        pieces = [slices(rank, 3) for rank in range(3)]
    joined = [[n for batch, samples in step if samples for n in batch] for step in zip(*pieces, strict=True)]
    assert joined == alone


def test_splitting_does_not_move_the_rank_s_own_random_state():
    with own_randomness():
        torch.manual_seed(1)
        random.seed(1)
        expected = (torch.rand(3), random.random())
        torch.manual_seed(1)
        random.seed(1)
        list(loaders(DataLoader(numbers(9), batch_size=4, sampler=PythonSampler()), 2)[0])
        list(loaders(DataLoader(numbers(9), batch_size=4, shuffle=True), 2)[0])
        assert torch.equal(torch.rand(3), expected[0])
        assert random.random() == expected[1]


@pytest.mark.parametrize("size", SIZES)
def test_weighted_slices_have_the_mean_of_the_global_batch(size):
    values = torch.randn(10, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(values, batch_size=4)
    parts = loaders(loader, size)
    for start, pieces in zip((0, 4, 8), zip(*map(weighed_means, parts), strict=True), strict=True):
        assert sum(pieces) / size == pytest.approx(values[start : start + 4].mean().item(), rel=1e-5)


def weighed_means(part):
    for batch in part:
        yield part.share.weight * batch.mean().item()


def test_a_rank_without_a_sample_repeats_one_that_counts_nothing():
    notes = []
    parts = loaders(DataLoader(numbers(2), batch_size=2), 3, notes=notes)
    found = []
    for part in parts:
        (batch,) = part_batches = list(seen(part))
        found.append(batch)
        assert len(part_batches) == 1
    assert sorted((samples, weight) for _, samples, weight in found) == [(0, 0.0), (1, 1.5), (1, 1.5)]
    assert notes[0].startswith("A global batch of 2 on 3 ranks leaves some without a sample")


def seen(part):
    for batch in part:
        yield batch.tolist(), part.share.samples, part.share.weight


def test_place_in_the_epoch_is_known():
    part = loaders(DataLoader(numbers(10), batch_size=4), 2)[0]
    assert len(part) == 3
    places = [(part.share.index, part.share.last, part.share.length) for _ in part]
    assert places == [(0, False, 3), (1, False, 3), (2, True, 3)]
    assert part.share is None


def test_breaking_out_of_an_epoch_leaves_no_batch_behind():
    part = loaders(DataLoader(numbers(10), batch_size=4), 2)[0]
    for _ in part:
        break
    assert part.share is None


def test_per_rank_batches_are_torch_s_habit():
    loader = DataLoader(numbers(14), batch_size=3)
    assert epoch(loader, 2, batch="per-rank") == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13]]
    own = DataLoader(numbers(11), batch_sampler=[[0, 1, 2, 3, 4], [5, 6], [7, 8, 9, 10]])
    parts = loaders(own, 2, batch="per-rank")
    assert len(parts[0]) == 2
    assert [list(seen(part)) for part in parts] == [
        [([0, 1, 2, 3, 4], 5, 10 / 7), ([7, 8, 9, 10], 4, 2.0)],
        [([5, 6], 2, 4 / 7), ([7], 0, 0.0)],
    ]


def test_workers_get_the_same_slices_in_order():
    loader = DataLoader(numbers(12), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    plain = DataLoader(numbers(12), batch_size=4, shuffle=True)
    parts, plain_parts = loaders(loader, 2)[:1], loaders(plain, 2)[:1]
    for _ in range(2):
        assert together(parts) == together(plain_parts)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), "iterable"),
        (lambda: DataLoader(numbers(4), batch_size=None), "does not batch"),
        (lambda: DataLoader(numbers(4), sampler=DistributedSampler(range(4), 2, 0)), "splits it already"),
    ],
)
def test_a_loader_that_cannot_be_split_is_left_alone_with_a_note(loader, reason):
    notes = []
    loader = loader()
    part = split(loader, rank=1, size=2, seed=0, batch="global", note=notes.append)
    assert reason in notes[0]
    assert isinstance(part, DataLoader)
    alone = split(loader, rank=0, size=1, seed=0, batch="global", note=notes.append)
    assert [str(batch) for batch in alone] == [str(batch) for batch in loader]
    assert len(notes) == 1


def test_the_last_batch_of_a_stream_is_known_as_such():
    part = split(DataLoader(Stream(), batch_size=2), rank=0, size=1, seed=0, batch="global", note=print)
    assert [(batch.tolist(), part.share.last, part.share.length) for batch in part] == [
        ([0, 1], False, None),
        ([2, 3], False, None),
        ([4], True, None),
    ]


def test_mistakes_are_one_line():
    loader = DataLoader(numbers(4), batch_size=2)
    (part,) = loaders(loader, 1)
    with pytest.raises(UsageOnRankError, match="prepared already"):
        loaders(part, 1)
    with pytest.raises(UsageOnRankError, match=r"no batch='local'\. Valid: global, per-rank"):
        loaders(loader, 1, batch="local")
