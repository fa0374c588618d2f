"""The one interface of a rank's device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank import host
from ddl_magics.rank.device import Device


def test_cpu_memory_follows_what_is_allocated():
    device = Device.of("cpu")
    before = device.memory()
    held = torch.ones(16 * 2**20)
    after = device.memory()
    size = held.numel() * 4
    assert abs(after["allocated"] - before["allocated"] - size) < 0.05 * size
    assert after["peak_total"] >= after["total"] > 0
    assert after["total"] < after["capacity"]


def test_resident_memory_follows_in_a_process_that_has_nothing_to_reuse():
    # A process that lived longer may take the tensor from memory that malloc kept, and so does not grow.
    program = (
        "import torch; from ddl_magics.rank.device import Device; device = Device.of('cpu');"
        "before = device.memory()['total']; held = torch.ones(16 * 2**20); print(device.memory()['total'] - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 0.8 * 16 * 2**20 * 4


def test_the_peak_begins_anew():
    device = Device.of("cpu")
    del_me = torch.ones(32 * 2**20)
    size = del_me.numel() * 4
    peak = device.memory()["peak_total"]
    del del_me
    device.reset_peak()
    assert device.memory()["peak_total"] < peak - 0.5 * size


def test_a_scheduler_s_limit_counts_as_capacity(monkeypatch):
    monkeypatch.setattr(host, "control_group_limits", lambda: [2**30])
    assert Device.of("cpu").capacity == 2**30


def test_seed_gives_the_same_numbers():
    device = Device.of("cpu")
    device.seed(3)
    first = torch.rand(2)
    device.seed(3)
    assert torch.equal(first, torch.rand(2))


def test_precision_is_checked_in_one_line():
    device = Device.of("cpu")
    with pytest.raises(UsageOnRankError, match=r"There is no precision 'fp8'\. Valid: 32, bf16-mixed, bf16-true"):
        device.require("fp8")
    with device.autocast("bf16-mixed"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert {"bf16", device.backend} <= device.capabilities


@pytest.mark.gpu
def test_asking_for_gpu_memory_starts_no_cuda():
    program = (
        "import torch; from ddl_magics.rank.device import Device; m = Device.of('cuda:0').memory();"
        "print(torch.cuda.is_initialized(), m['device_used'] > 0, m['capacity'] > 2**30)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True", "True"]


@pytest.mark.gpu
def test_gpu_memory_tells_allocated_reserved_and_peaks():
    device = Device.of("cuda:0")
    device.activate()
    held = torch.ones(2**20, device="cuda")
    memory = device.memory()
    assert memory["allocated"] >= held.numel() * 4
    assert memory["peak_reserved"] >= memory["reserved"] >= memory["allocated"]
    assert memory["total"] == memory["reserved"] < memory["device_used"] < memory["capacity"]
