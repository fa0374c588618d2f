"""What the history of a run keeps of the ranks' records."""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
import time

import pytest

from ddl_magics.protocol import Outcome, Point, Progress, Sample
from ddl_magics.telemetry.history import MAX_METRICS, History, RankInfo, RunInfo, by_kind
from ddl_magics.telemetry.series import MAX_BUCKETS

pytestmark = pytest.mark.timeout(60)


def run(ranks=2, **kwargs):
    info = RunInfo("r1", "first", "ddp", ranks, started=100.0, **kwargs)
    return History(info, [RankInfo(r, "n1", 10 + r, "cpu") for r in range(ranks)])


def sample(rank, seq, points=(), **kwargs):
    return Sample(rank, seq, 100.0, 1, "r1", "running", points=tuple(points), **kwargs)


def loss(step, value, weight=1.0, name="loss"):
    return Point(name, step, value, 100.0, weight)


def test_mean_over_ranks_is_weighted_and_the_spread_is_min_to_max():
    history = run()
    history.add(sample(0, 0, [loss(0, 2.0, 30), loss(1, 1.0, 10)]))
    history.add(sample(1, 0, [loss(0, 4.0, 10), loss(1, 3.0, 10)]))
    curve = history.view().loss
    assert [(p.step, p.mean, p.low, p.high) for p in curve.points] == [(0, 2.5, 2.0, 4.0), (1, 2.0, 1.0, 3.0)]
    assert (curve.first, curve.last, curve.last_step, curve.best) == (2.5, 2.0, 1, 2.0)
    assert curve.ranks == (0, 1)


def test_each_rank_keeps_a_curve_of_its_own():
    history = run()
    history.add(sample(0, 0, [loss(0, 2.0)]))
    history.add(sample(1, 0, [loss(0, 4.0)]))
    assert [p.mean for p in history.rank_points("loss", 1)] == [4.0]
    assert history.rank_points("loss", 7) == []
    assert history.rank_points("nothing", 0) == []


def test_a_curve_ends_where_all_ranks_have_reported_and_is_whole_at_the_end():
    history = run()
    history.add(sample(0, 0, [loss(s, 1.0) for s in range(10)]), now=101)
    history.add(sample(1, 0, [loss(s, 3.0) for s in range(4)]), now=101)
    assert [p.step for p in history.view(101.5).loss.points] == [0, 1, 2, 3]
    assert history.view(101.5).loss.last == 2.0
    history.finish([Outcome(0, "ok"), Outcome(1, "ok")], now=102)
    assert len(history.view(103).loss.points) == 10


def test_a_rank_that_stops_logging_holds_the_curve_up_only_for_a_moment():
    history = run()
    history.add(sample(0, 0, [loss(s, 1.0) for s in range(3)]), now=101)
    history.add(sample(1, 0, [loss(0, 3.0)]), now=101)
    history.add(sample(0, 1, [loss(3, 1.0)]), now=110)
    assert [p.step for p in history.view(110).loss.points] == [0, 1, 2, 3]


def test_nan_and_infinities_are_kept_and_marked():
    history = run()
    history.add(sample(0, 0, [loss(0, 2.0), loss(1, math.nan), loss(2, math.inf), loss(3, 1.0)]))
    history.add(sample(1, 0, [loss(0, 2.0), loss(1, 1.5), loss(2, 1.0), loss(3, 1.0)]))
    curve = history.view().loss
    assert [(p.step, p.mean, p.wild) for p in curve.points] == [(0, 2.0, 0), (1, 1.5, 1), (2, 1.0, 1), (3, 1.0, 0)]
    assert (curve.wild, curve.first_wild, curve.last) == (2, 1, 1.0)
    history.add(sample(0, 1, [loss(4, math.nan)]))
    history.add(sample(1, 1, [loss(4, 1.0)]))
    assert math.isnan(history.view().loss.last)
    history.add(sample(0, 2, [loss(5, -math.inf)]))
    history.add(sample(1, 2, [loss(5, 1.0)]))
    assert history.view().loss.last == -math.inf
    assert history.view().loss.first == 2.0


def test_ranks_without_weight_do_not_enter_the_mean():
    history = run()
    history.add(sample(0, 0, [loss(0, 2.0, 5.0)]))
    history.add(sample(1, 0, [loss(0, 100.0, 0.0)]))
    assert history.view().loss.last == 2.0
    alone = run(1)
    alone.add(sample(0, 0, [loss(0, 3.0, 0.0)]))
    assert alone.view().loss.last == 3.0


def test_a_long_run_stays_small_and_keeps_mean_least_greatest_first_and_last():
    history = run(1)
    values = [math.sin(s / 50) + (100.0 if s == 12_345 else 0.0) for s in range(60_000)]
    for start in range(0, 60_000, 500):
        history.add(sample(0, start // 500, [loss(s, values[s]) for s in range(start, start + 500)]))
    curve = history.view().loss
    assert len(curve.points) <= MAX_BUCKETS
    assert curve.width == 128
    assert max(p.high for p in curve.points) == max(values)
    assert min(p.low for p in curve.points) == min(values)
    assert curve.points[3].mean == pytest.approx(sum(values[384:512]) / 128)
    assert (curve.first, curve.last, curve.last_step) == (values[0], values[-1], 59_999)
    assert len(history._series["loss"].by_rank[0].recent) <= 256


def test_number_of_metrics_is_bounded_with_a_note():
    history = run(1)
    history.add(sample(0, 0, [loss(0, 1.0, name=f"m{i}") for i in range(MAX_METRICS + 5)]))
    view = history.view()
    assert len(view.curves) == MAX_METRICS
    assert any("More than" in note for note in view.notes)


def test_a_second_loop_in_the_same_cell_gives_the_last_value_and_the_first_stays():
    history = run(1)
    history.add(sample(0, 0, [loss(s, 5.0 - s) for s in range(5)]))
    history.add(sample(0, 1, [loss(0, 9.0), loss(1, 8.0)]))
    curve = history.view().loss
    assert (curve.first, curve.last, curve.last_step) == (5.0, 8.0, 1)
    assert len(curve.points) == 5


def test_two_values_of_one_step_are_averaged():
    history = run(1)
    history.add(sample(0, 0, [loss(0, 1.0), loss(0, 3.0), loss(1, 4.0)]))
    assert history.view().loss.first == 2.0


def test_lost_records_are_counted_until_they_come_late_and_repeats_are_ignored():
    history = run(1)
    assert history.add(sample(0, 5))
    assert history.add(sample(0, 8, [loss(3, 1.0)]))
    assert history.view().lost == 2
    assert history.add(sample(0, 6, [loss(1, 2.0)]))
    assert history.view().lost == 1
    assert not history.add(sample(0, 6, [loss(1, 2.0)]))
    assert history.view().loss.points[0].mean == 2.0
    assert history.view().ranks[0].sample.seq == 8
    history.add(sample(0, 2_000_000))
    assert sys.getsizeof(history._ranks[0].missing) < 2_000_000


def test_records_of_another_run_or_rank_are_refused():
    history = run()
    assert not history.add(dataclasses.replace(sample(0, 0), run="r2"))
    assert not history.add(sample(9, 0))
    assert history.view().ranks[0].sample is None
    assert history.view().ranks[0].state == "starting"


def test_peak_is_the_highest_total_with_its_kinds():
    history = run(1)
    history.add(
        sample(0, 0, memory={"parameters": 4, "total": 10, "capacity": 100}, peak={"parameters": 4, "other": 8})
    )
    history.add(sample(0, 1, memory={"parameters": 4, "total": 30, "capacity": 100}))
    history.add(sample(0, 2, memory={"parameters": 4, "total": 9, "capacity": 100}))
    rank = history.view().ranks[0]
    assert (rank.total, rank.peak_total, rank.capacity) == (9, 30, 100)
    assert rank.peak == {"parameters": 4, "gradients": 0, "optimizer": 0, "other": 26, "reserved": 0}
    assert sum(rank.memory.values()) == rank.total


def test_peak_has_the_kinds_of_a_model_that_was_looked_at_after_the_highest_total():
    history = run(1)
    history.add(sample(0, 0, peak={"other": 30, "total": 30}))
    history.add(sample(0, 1, peak={"parameters": 4, "optimizer": 8, "other": 17, "total": 29}))
    rank = history.view().ranks[0]
    assert rank.peak_total == 30
    assert rank.peak == {"parameters": 4, "gradients": 0, "optimizer": 8, "other": 18, "reserved": 0}


def test_kinds_add_up_to_the_total_whatever_is_reported():
    assert sum(by_kind({"parameters": 4, "total": 10}).values()) == 10
    assert by_kind({"parameters": 4, "other": 8, "reserved": 3, "total": 10})["other"] == 3
    assert by_kind({"parameters": 4, "other": 1, "reserved": 9, "total": 5}) == {
        "parameters": 4, "gradients": 0, "optimizer": 0, "other": 0, "reserved": 1
    }  # fmt: skip
    assert sum(by_kind({"parameters": 4, "gradients": 4}).values()) == 8


def test_progress_adds_rates_and_takes_the_median_step_and_the_slowest_rank():
    history = run(3)
    for rank, (step, seconds) in enumerate([(10, 0.5), (9, 0.6), (10, 0.9)]):
        progress = Progress(step, 100, 0, 2, seconds, 1000.0, 8.0)
        history.add(sample(rank, 0, progress=progress))
    p = history.view(130.0).progress
    assert (p.step, p.total, p.elapsed, p.epochs) == (9, 100, 30.0, 2)
    assert (p.tokens_per_second, p.samples_per_second) == (3000.0, 24.0)
    assert p.seconds_per_step == 0.6
    assert p.remaining == pytest.approx(91 * 0.6)
    assert p.slowest == (2, 0.9)
    history.finish([], now=140.0)
    p = history.view(999.0).progress
    assert (p.elapsed, p.remaining) == (40.0, 0.0)


def test_state_lasts_since_it_changed():
    history = run(1)
    history.add(dataclasses.replace(sample(0, 0), state="waiting", line=3), now=101.0)
    history.add(dataclasses.replace(sample(0, 1), state="waiting", line=3), now=105.0)
    assert history.view(112.0).ranks[0].since == 11.0


def test_notes_are_kept_once_in_order():
    history = run()
    history.add(sample(0, 0, notes=("b", "a")))
    history.add(sample(1, 0, notes=("a", "c")))
    history.note("c")
    assert history.view().notes == ("b", "a", "c")


def test_history_is_complete_when_every_rank_that_spoke_sent_its_last_record():
    history = run()
    history.add(sample(0, 0, last=True))
    assert history.complete
    history.add(sample(1, 0))
    assert not history.complete
    history.add(sample(1, 1, last=True))
    assert history.complete


def test_one_thread_writes_while_another_reads():
    history, failures = run(4), []

    def read():
        while not history.finished:
            curve = history.view().loss
            if curve and any(p.mean != 1.0 for p in curve.points):
                failures.append(curve)

    reader = threading.Thread(target=read)
    reader.start()
    for seq in range(100):
        for rank in range(4):
            history.add(sample(rank, seq, [loss(s, 1.0) for s in range(seq * 10, seq * 10 + 10)]))
    history.finish([])
    reader.join(10)
    assert not reader.is_alive()
    assert not failures


def test_512_ranks_are_cheap_to_keep_and_to_view():
    history = run(512)
    began = time.process_time()
    for seq in range(4):
        for rank in range(512):
            history.add(sample(rank, seq, [loss(s, 1.0) for s in range(seq * 10, seq * 10 + 10)]))
    assert time.process_time() - began < 2.0
    began = time.process_time()
    for _ in range(4):
        view = history.view()
    assert time.process_time() - began < 1.0
    assert len(view.ranks) == 512
