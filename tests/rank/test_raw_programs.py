"""Programs of other libraries, as their own documentation writes them, run in one world of two (raw_ranks.py)."""

from __future__ import annotations

import pytest

from tests.strategies.ranks import start

# DeepSpeed compiles an operator at its first use on a machine.
pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return start("../rank/raw_ranks.py", 2, tmp_path_factory.mktemp("raw"), timeout=400)


def test_torch_distributed_and_ddp(found):
    assert found.of("ddp") == 2 * [{"world": 2, "gradient": [0.5, 0.5], "mean": 0.5}]


def test_accelerate(found):
    assert found.of("accelerate") == 2 * [{"world": 2, "gathered": [0, 1], "batches": 2}]


def test_transformers_trainer(found):
    """8 samples, 2 at a time on each of two ranks: 2 steps."""
    assert found.of("trainer") == [{"world": 2, "steps": 2, "rank": rank} for rank in range(2)]


def test_lightning_fabric(found):
    assert found.of("fabric") == 2 * [{"world": 2, "gathered": [0, 1]}]


def test_deepspeed(found):
    assert found.of("deepspeed") == 2 * [{"world": 2, "data_parallel": 2}]


def test_the_group_is_whole_afterwards(found):
    assert found.of("afterwards") == [0.5, 0.5]
    assert found.returncode == 0, found.output
