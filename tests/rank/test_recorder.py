"""What the cell puts down for the sampler."""

from __future__ import annotations

import time

import pytest
import torch

from ddl_magics.protocol import Progress
from ddl_magics.rank import recorder as module
from ddl_magics.rank.device import CPU, Device
from ddl_magics.rank.recorder import Recorder


class SlowDevice(CPU):
    """A device whose numbers are there only when told so, as a GPU's are."""

    def __init__(self):
        super().__init__()
        self.done = False

    def read(self, value):
        device = self

        class Reading:
            def ready(self):
                return device.done

            def value(self):
                assert device.done, "read before it was there"
                return float(value)

        return Reading()


def test_points_come_in_order_with_their_weight():
    recorder = Recorder(CPU())
    recorder.record("loss", 1, torch.tensor(2.5, requires_grad=True), weight=3)
    recorder.record("rate", 1, 0.1)
    points = recorder.drain()["points"]
    assert [(p.name, p.step, p.value, p.weight) for p in points] == [("loss", 1, 2.5, 3.0), ("rate", 1, 0.1, 1.0)]
    assert abs(points[0].time - time.time()) < 60
    assert recorder.drain()["points"] == ()


def test_a_number_still_on_the_device_is_not_waited_for():
    device = SlowDevice()
    recorder = Recorder(device)
    recorder.record("loss", 1, torch.tensor(1.0), weight=torch.tensor(4.0))
    assert recorder.drain()["points"] == ()
    device.done = True
    (point,) = recorder.drain()["points"]
    assert (point.value, point.weight) == (1.0, 4.0)


def test_the_last_drain_waits_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    recorder = Recorder(SlowDevice())
    recorder.record("loss", 1, torch.tensor(1.0))
    started = time.monotonic()
    assert recorder.drain(final=True)["points"] == ()
    assert time.monotonic() - started < 5


def test_nothing_grows_without_bound_when_nobody_drains(monkeypatch):
    monkeypatch.setattr(module, "POINTS", 10)
    recorder = Recorder(CPU())
    for step in range(25):
        recorder.record("loss", step, 0.0)
    drained = recorder.drain()
    assert [point.step for point in drained["points"]] == list(range(15, 25))
    assert drained["notes"] == ("15 points of the curves were dropped: they came faster than they were sent.",)


def test_each_note_is_said_once_in_a_run():
    recorder = Recorder(CPU())
    assert [recorder.note("once"), recorder.note("once")] == [True, False]
    assert recorder.drain()["notes"] == ("once",)
    assert recorder.drain()["notes"] == ()
    recorder.start_run("next")
    recorder.note("once")
    assert recorder.drain()["notes"] == ("once",)


def test_a_new_run_drops_what_the_last_left():
    recorder = Recorder(CPU())
    recorder.record("loss", 1, 1.0)
    recorder.progress(Progress(step=3))
    recorder.start_run("next")
    assert recorder.drain() == {"points": (), "progress": None, "notes": ()}


def test_recording_a_loss_costs_microseconds():
    """Under 1 % of a step of 5 ms, with room for a busy machine: the best of several rounds."""
    recorder = Recorder(Device.of("cpu"))
    loss = torch.tensor(1.0)

    def seconds_a_call():
        started = time.perf_counter()
        for step in range(200):
            recorder.record("loss", step, loss, 8.0)
        return (time.perf_counter() - started) / 200

    assert min(seconds_a_call() for _ in range(20)) < 50e-6


@pytest.mark.gpu
def test_on_a_gpu_a_loss_is_read_without_synchronising():
    device = Device.of("cuda:0")
    device.activate()
    recorder = Recorder(device)
    recorder.record("warm", 0, torch.ones((), device="cuda"))
    torch.cuda.synchronize()
    recorder.drain()
    torch.cuda._sleep(2_000_000_000)  # about a second of work before the loss
    started = time.perf_counter()
    recorder.record("loss", 1, torch.ones((), device="cuda") * 3, weight=torch.ones((), device="cuda") * 7)
    assert recorder.drain()["points"] == ()
    assert time.perf_counter() - started < 0.3
    torch.cuda.synchronize()
    (point,) = recorder.drain()["points"]
    assert (point.value, point.weight) == (3.0, 7.0)
    assert len(device._free) == 4096
