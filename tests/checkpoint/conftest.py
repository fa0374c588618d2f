"""One rank, in the process of the tests."""

from __future__ import annotations

import itertools

import pytest
import torch

from ddl_magics.protocol import CellRequest, World
from ddl_magics.rank.context import Context

CELLS = itertools.count(1)


@pytest.fixture(scope="module")
def rank():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Context(World(0, 1, 0, 1))
    torch.set_num_threads(threads)


@pytest.fixture
def ddl(rank):
    begin(rank)
    yield rank
    rank.end_cell()
    rank.forget_dropped_models()


def begin(rank, **options):
    number = next(CELLS)
    rank.recorder.start_run(f"run{number}")
    rank.begin_cell(CellRequest(code="", cell=number, run=f"run{number}", name="", strategy="single", **options))
