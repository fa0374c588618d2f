"""One rank, in the process of the tests."""

from __future__ import annotations

import pytest
import torch

from tests.one_rank import begin, one_rank


@pytest.fixture(scope="module")
def rank():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield one_rank()
    torch.set_num_threads(threads)


@pytest.fixture
def ddl(rank):
    begin(rank)
    yield rank
    rank.end_cell()
    rank.forget_dropped_models()
