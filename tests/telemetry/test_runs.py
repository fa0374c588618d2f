"""The comparison of finished runs."""

from __future__ import annotations

import math

import pytest

from ddl_magics.protocol import Outcome
from ddl_magics.telemetry.history import History, RunInfo
from ddl_magics.telemetry.runs import MAX_RUNS, Runs
from tests.views.simulated import GIB, failed, history


def test_rows_give_losses_memory_and_ratios_to_the_first_run():
    runs = Runs()
    for number, (strategy, share) in enumerate([("ddp", (1, 1, 2, 0, 0)), ("zero:3", (0.5, 0.5, 1, 0, 0))]):
        ended = [Outcome(r, "ok") for r in range(2)]
        runs.add(history(2, 60, 60, run_id=f"r{number}", strategy=strategy, share=share, finish=ended))
    ddp, zero = runs.rows()
    assert (ddp.strategy, ddp.metric, ddp.last_step, ddp.outcome) == ("ddp", "loss", 59, "ok")
    assert ddp.first > ddp.last > 1.7
    assert (ddp.memory_ratio, ddp.speedup) == (1.0, 1.0)
    assert zero.memory_ratio == pytest.approx(0.5)
    assert zero.peak["optimizer"] == int(GIB * 1.12)
    assert zero.peak_total == sum(zero.peak.values())
    assert set(zero.peak_by_rank) == {0, 1}
    assert zero.tokens_per_second == 6200.0
    assert [row.run for row in runs.rows(["r1", "gone"])] == ["r1"]
    assert runs.rows(["r1"])[0].memory_ratio == 1.0


def test_a_run_ends_as_its_worst_rank_did_and_can_be_found_by_name():
    runs = Runs()
    runs.add(history(finish=failed(), name="one"))
    assert runs.rows()[0].outcome == "error"
    assert runs.get("one") is runs.get("zero:3") is runs.get("r1")
    assert runs.get("two") is None


def test_a_run_that_tells_nothing_has_a_row_all_the_same_and_old_runs_go():
    runs = Runs()
    for number in range(MAX_RUNS + 3):
        empty = History(RunInfo(f"r{number}", "x", "ddp", 1), [])
        empty.finish([])
        runs.add(empty)
    assert len(runs) == MAX_RUNS
    row = runs.rows()[0]
    assert row.run == "r3"
    assert math.isnan(row.last)
    assert row.memory_ratio is None
    assert row.speedup is None
