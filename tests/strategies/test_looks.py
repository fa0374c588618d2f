"""When memory is looked at: by the thread that trains, and seldom enough."""

from __future__ import annotations

import threading

from ddl_magics.strategies import looks
from ddl_magics.strategies.looks import Looks


class Model:
    """Counts how often, and on which threads, it was measured."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def measure(self) -> dict[str, int]:
        self.threads.append(threading.get_ident())
        return {"gradients": 10 * len(self.threads)}


def on_another_thread(action):
    result = []
    thread = threading.Thread(target=lambda: result.append(action()))
    thread.start()
    thread.join()
    return result[0]


def test_another_thread_gets_the_last_look_and_measures_nothing():
    seen, model = Looks(), Model()
    seen.at("prepare", model.measure)
    assert on_another_thread(lambda: seen.now(model.measure)) == {"gradients": 10}
    assert model.threads == [threading.get_ident()]
    assert seen.now(model.measure) == {"gradients": 20}


def test_the_thread_that_trains_is_the_one_that_measures():
    seen, model = Looks(), Model()
    on_another_thread(lambda: seen.at("backward", model.measure))
    assert seen.now(model.measure) == {"gradients": 10}
    assert threading.get_ident() not in model.threads


def test_each_moment_of_a_step_is_looked_at_four_times_a_second_at_most(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(looks.time, "monotonic", lambda: clock[0])
    seen, model = Looks(), Model()
    for _ in range(1000):  # ten seconds of steps of 10 ms
        seen.at("backward", model.measure)
        seen.at("step", model.measure)
        clock[0] += 0.01
    assert 2 * 36 <= len(model.threads) <= 2 * (40 + looks.EAGER)


def test_the_peak_is_the_highest_of_each_kind_until_it_is_forgotten():
    seen = Looks()
    seen.at("backward", lambda: {"gradients": 5, "optimizer": 0})
    seen.at("step", lambda: {"gradients": 0, "optimizer": 8})
    assert seen.peak() == {"gradients": 5, "optimizer": 8}
    seen.forget_peak()
    seen.at("step", lambda: {"gradients": 0, "optimizer": 8})
    assert seen.peak() == {"gradients": 0, "optimizer": 8}
