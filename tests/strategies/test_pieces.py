"""Pieces of whole tensors: any range is read out of any shape, and the layout of ZeRO's flat tensors leaves no gap."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies import zero_layout
from ddl_magics.strategies.pieces import read

pytestmark = pytest.mark.timeout(60)


class Rows:
    """A whole tensor that notes how many elements were read."""

    def __init__(self, *shape):
        self.whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        self.shape = self.whole.shape
        self.read = 0

    def __getitem__(self, index):
        part = self.whole[index]
        self.read += part.numel()
        return part


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 2, 4), (1, 6), (6, 1)])
def test_any_range_is_read(shape):
    numel = torch.Size(shape).numel()
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        whole = Rows(*shape)
        assert read(whole, start, stop).tolist() == list(range(start, stop))
        row = numel // shape[0]
        assert whole.read <= (stop - start) + 2 * (row - 1), "no more than the rows at both ends beside it"


def test_a_number_is_read():
    assert read(torch.tensor(3.0), 0, 1).tolist() == [3.0]


def test_any_range_of_a_block_is_read():
    whole = Rows(6, 8)
    block = whole.whole[2:5, 4:8].reshape(-1)
    for start, stop in itertools.combinations_with_replacement(range(13), 2):
        whole.read = 0
        assert torch.equal(read(whole, start, stop, slice(2, 5), slice(4, 8)), block[start:stop])
        assert whole.read <= (stop - start) + 2 * 3


@pytest.mark.parametrize("size", [3, 5, 8, 20])
@pytest.mark.parametrize(("first", "numel"), [(0, 4), (3, 5), (7, 1), (4, 12)])
def test_pieces_of_ranks_make_a_parameter(size, first, numel):
    """`size` elements of the flat tensor for each rank; the parameter begins at `first`."""
    flat = torch.arange(float(-(-(first + numel) // size) * size))
    whole = torch.full((numel,), -1.0)
    homes = [zero_layout.place(0, first, numel, size, rank) for rank in range(len(flat) // size)]
    for rank, home in enumerate(homes):
        assert home.pieces == homes[0].pieces
        whole[home.mine.start : home.mine.stop] = home.part(flat[rank * size : (rank + 1) * size])
    assert torch.equal(whole, flat[first : first + numel])


@pytest.mark.parametrize("swapped", ["swap_optimizer", "params_in_nvme_and_cpu"])
def test_what_is_on_nvme_is_refused(swapped):
    with pytest.raises(UsageOnRankError, match="keeps tensors of this model on NVMe"):
        zero_layout.homes(SimpleNamespace(**{swapped: True}))
