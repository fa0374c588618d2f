"""The adapter: AxoNN as it is where a rank has a GPU, AxoNN on gloo where it has none, and a way back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from ddl_magics.errors import UsageOnRankError
from ddl_magics.protocol import World
from ddl_magics.strategies import spec

pytest.importorskip("axonn")

from ddl_magics.strategies.axonn import adapter, groups


def globals_of_axonn():
    """What AxoNN's modules call torch and torch.distributed, and their custom function's two halves."""
    named = {
        (module, name): getattr(sys.modules[module], name)
        for module in adapter.MODULES
        for name in ("torch", "dist")
        if hasattr(sys.modules[module], name)
    }
    function = sys.modules["axonn.intra_layer.fully_connected"].AsyncLinear
    return named | {("AsyncLinear", name): vars(function)[name] for name in ("forward", "backward")}


@pytest.fixture
def plain():
    """AxoNN as it was imported, and afterwards again."""
    adapter.load("cuda:0")  # imports only
    adapter.uninstall()
    yield globals_of_axonn()
    adapter.uninstall()


def test_nothing_is_touched_when_cuda_is_there(plain, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    before = dict(vars(torch)), dict(vars(dist))
    adapter.load("cuda:0")
    assert not adapter.installed()
    assert globals_of_axonn() == plain
    assert all(value in (torch, dist) for (module, _), value in plain.items() if module in adapter.MODULES)
    assert (vars(torch), vars(dist)) == before


def test_on_the_cpu_only_axonns_own_modules_change_and_change_back(plain):
    before = dict(vars(torch)), dict(vars(dist)), dict(vars(torch.cuda))
    adapter.load("cpu")
    adapter.load("cpu")  # a second time is nothing new
    assert adapter.installed()
    assert all(value is not plain[key] for key, value in globals_of_axonn().items())
    assert (vars(torch), vars(dist), vars(torch.cuda)) == before
    adapter.uninstall()
    assert globals_of_axonn() == plain


def test_adapted_torch_is_torch_but_for_the_device(plain):
    adapter.load("cpu")
    adapted = sys.modules["axonn.intra_layer.fully_connected"].torch
    assert adapted.nn is torch.nn
    assert adapted.empty((2, 3), device="cuda").device.type == "cpu"
    assert adapted.tensor(3, device="cuda").item() == 3
    assert adapted.empty(2, device="meta").device.type == "meta"
    assert adapted.cuda.current_device() == "cpu"
    with pytest.raises(AttributeError):
        adapted.no_such_name  # noqa: B018 - asking for it is the test


def test_axonn_is_imported_where_mpi4py_finds_no_library():
    code = (
        "import mpi4py, sys\n"
        "from ddl_magics.strategies.axonn import adapter\n"
        "adapter.load('cpu')\n"
        "import axonn.communication\n"
        "assert not axonn.communication.MPI4PY\n"
        "assert sys.modules['mpi4py'] is mpi4py and mpi4py.rc.initialize is True\n"
    )
    environment = {**os.environ, "MPI4PY_LIBMPI": "/no/such/libmpi.so"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=environment)


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_world_size", "device", "number"),
    [
        (5, 1, 4, "cuda:1", 4),  # two nodes of four
        (5, 1, 4, "cuda:0", 1),  # each rank sees its own GPU only
        (3, 3, 4, "cuda:3", 4),
        (4, 0, 3, "cuda:0", 1),  # nodes of four and three
        (0, 0, 1, "cpu", 1),
    ],
)
def test_axonn_is_given_the_number_that_names_this_ranks_device(rank, local_rank, local_world_size, device, number):
    world = World(rank, 8, local_rank, local_world_size, device=device)
    assert groups._gpus_per_node(world) == number
    if device != "cpu":
        assert rank % number == int(device[-1])


def test_a_device_that_axonns_rule_cannot_name_is_told():
    with pytest.raises(UsageOnRankError, match="rank modulo GPUs"):
        groups._gpus_per_node(World(0, 2, 0, 2, device="cuda:1"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_gpu_trains_without_the_adapter(plain, tmp_path):
    from ddl_magics.strategies.base import Training
    from tests.strategies.models import MLP

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    strategy = spec.load(spec.parse("axonn:1x1x1"), World(0, 1, 0, 1, device="cuda:0"))
    try:
        model = MLP()
        prepared = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), Training("bf16-mixed"))
        batch = {"x": torch.randn(4, 32).cuda(), "labels": torch.zeros(4, dtype=torch.long).cuda()}
        losses = []
        for _ in range(3):
            loss = prepared(**batch).loss
            prepared.backward(loss, boundary=True)
            prepared.step(1.0)
            losses.append(float(loss))
        assert losses[-1] < losses[0]
        assert not adapter.installed()
        assert globals_of_axonn() == plain
        prepared.close()
    finally:
        strategy.close()
        dist.destroy_process_group()
