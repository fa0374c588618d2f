"""Options of a start: defaults, contradictions, and the environment that ranks get."""

from __future__ import annotations

import os

import pytest

from ddl_magics.cluster.options import ClusterOptions
from ddl_magics.errors import UsageError


def test_without_gpus_two_ranks_start_and_with_masked_ones_one_for_each(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ClusterOptions().world_size() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5")
    assert ClusterOptions().world_size() == 3
    assert ClusterOptions(device="cpu").world_size() == 2
    assert ClusterOptions(n=7).world_size() == 7
    assert ClusterOptions(nproc_per_node=4).world_size() == 4


def test_threads_come_from_the_cores_a_rank_may_use_unless_set(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert ClusterOptions().environment(4)["OMP_NUM_THREADS"] == "3"
    assert ClusterOptions().environment(100)["OMP_NUM_THREADS"] == "1"
    assert ClusterOptions(env=("OMP_NUM_THREADS=5",)).environment(4)["OMP_NUM_THREADS"] == "5"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "OMP_NUM_THREADS" not in ClusterOptions().environment(4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 0}, "-n 0"),
        ({"nnodes": 2}, "--nnodes 2"),
        ({"n": 3, "nproc_per_node": 2}, "-n 3 is not"),
        ({"launcher": "mpj"}, "Did you mean 'mpi'?"),
        ({"device": "gpu"}, "there is no device 'gpu'"),
        ({"timeout": 0}, "--timeout 0"),
        ({"env": ("NOVALUE",)}, "NAME=VALUE"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_remedy(options, said):
    with pytest.raises(UsageError) as error:
        ClusterOptions(**options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
