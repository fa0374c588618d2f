"""`%ddl where` and the panel's rows and warnings: what is shown of ranks that wait, and when it goes away."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from ddl_magics.protocol import Outcome, Sample, Waiting
from ddl_magics.telemetry.history import History, RankInfo, RunInfo
from ddl_magics.views.holdups import called
from ddl_magics.views.panel import Panel, still_picture
from ddl_magics.views.panel_html import panel_html
from ddl_magics.views.standing import ADVICE
from ddl_magics.views.status import StatusRow, status_lines
from ddl_magics.views.text import panel_text, plain, status_line
from ddl_magics.views.where import ANSWER_S, where, where_html, where_lines
from tests.views.simulated import history

pytestmark = pytest.mark.timeout(60)
EVIL = '<script>alert("x")</script>&'


def frame(line, source, function="<module>", *, cell=True, file="/tmp/ipykernel_1/2.py"):
    return {"file": file, "line": line, "function": function, "source": source, "user": cell, "cell": cell}


TORCH = frame(3004, "work.wait()", "all_reduce", cell=False, file="/v/lib/site-packages/torch/distributed/c10d.py")


def waits(line=12, source="loss = dist.all_reduce(x)", seconds=34.0, group=range(8), stack=None):
    waiting = Waiting("all_reduce", seconds, tuple(group), "0", 5, ((4,),), "Float")
    stack = stack or [frame(20, "train(model)"), frame(line, source, "train"), TORCH]
    return {"state": "waiting", "seconds": seconds, "line": line, "source": source, "waiting": waiting.to_wire(),
            "stack": stack}  # fmt: skip


def sleeps(line=9, seconds=35.0):
    return {"state": "running", "seconds": seconds, "line": line, "source": "time.sleep(60)", "waiting": None,
            "stack": [frame(line, "time.sleep(60)")]}  # fmt: skip


def text(answers, world=None, **options):
    return plain(where_lines(where(answers, world or len(answers), **options)))


def words(html):
    tree = ET.fromstring(re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL))
    return " ".join(" ".join(tree.itertext()).split())


def test_equal_stacks_are_one_group_and_who_waits_for_whom_comes_first():
    answers = {rank: waits() for rank in range(8)} | {1: sleeps()}
    assert text(answers).splitlines() == [
        "ranks 0,2-7 wait 34 s in all_reduce (cell line 12) for rank 1, which is in time.sleep (line 9)",
        "",
        "● ranks 0,2-7: all_reduce, cell line 12: loss = dist.all_reduce(x)  (34 s)",
        "    cell line 20: train(model)",
        "● rank 1: time.sleep, cell line 9: time.sleep(60)  (35 s)",
    ]
    assert words(where_html(where(answers, 8))).replace("● ", "") == " ".join(text(answers).replace("● ", "").split())


def test_the_whole_stack_has_the_libraries_frames_innermost_first_and_the_users_stand_out():
    shown = where({0: waits(group=(0,))}, 1, full=True)
    assert plain(where_lines(shown)).splitlines()[1:] == [
        "    torch/distributed/c10d.py:3004, in all_reduce: work.wait()",
        "    cell line 12, in train: loss = dist.all_reduce(x)",
        "    cell line 20: train(model)",
    ]
    assert [style for line in where_lines(shown)[1:] for _, style in line] == ["dim", "", ""]


def test_one_rank_may_be_asked_for_and_the_sentence_stays_whole():
    answers = {rank: waits() for rank in range(8)} | {1: sleeps()}
    shown = text(answers, rank=1)
    assert "ranks 0,2-7 wait 34 s" in shown
    assert "● rank 1: time.sleep" in shown
    assert "● ranks" not in shown


def test_ranks_that_do_not_answer_are_dead_or_idle_are_named():
    answers = {0: sleeps(), 2: {"state": "dead"}, 3: {"state": "idle", "seconds": 90.0}, 4: {"state": "outside"}}
    answers |= {5: {"state": "idle", "seconds": 1.0}}
    shown = text(answers, world=8, ended={5})
    assert f"ranks 1,6-7: no answer within {ANSWER_S:g} s" in shown
    assert "rank 2: dead" in shown
    assert "rank 3: idle  (90 s)" in shown
    assert "rank 4: not in this cell" in shown
    assert "rank 5: ended the cell" in shown


def test_ranks_that_are_idle_are_one_line():
    assert text({rank: {"state": "idle", "seconds": 5.0} for rank in range(512)}) == "● ranks 0-511: idle  (5 s)"


def test_a_breakpoint_and_code_outside_the_cell_are_told():
    stopped = sleeps() | {"state": "stopped", "source": "breakpoint()", "line": 4}
    assert "rank 0: stopped at a breakpoint, cell line 4: breakpoint()" in text({0: stopped})
    nowhere = {"state": "running", "seconds": 3.0, "line": None, "source": "", "waiting": None, "stack": [TORCH]}
    assert "rank 0: in no line of the cell  (3 s)" in text({0: nowhere})
    module = [frame(3, "train()"), frame(8, "step()", "fit", cell=False, file="/home/me/mine/fit.py") | {"user": True}]
    mine = sleeps(3) | {"source": "train()", "stack": module}
    assert text({0: mine}).splitlines()[1:] == ["    mine/fit.py:8, in fit: step()"]


@pytest.mark.parametrize("ranks", [2, 4, 8, 512])
def test_any_number_of_ranks_is_a_page(ranks):
    everybody = range(ranks)
    for answers in (
        {rank: waits(group=everybody) for rank in everybody} | {ranks - 1: sleeps()},
        {rank: sleeps(rank) for rank in everybody},
        {rank: waits(rank, EVIL * 100, stack=[frame(i, EVIL * 100, "f") for i in range(60)]) for rank in everybody},
    ):
        for full in (False, True):
            shown = where(answers, ranks, full=full)
            html = where_html(shown)
            assert "<script" not in html
            assert words(html)
            assert len(plain(where_lines(shown)).splitlines()) <= (800 if full else 110)
            assert all(len(line) < 1200 for line in plain(where_lines(shown)).splitlines())
    assert ("more rank" in text({rank: sleeps(rank) for rank in everybody})) == (ranks > 12)


# The panel.

IN_LINE = ("waiting", 12, "dist.all_reduce(x)")
ASLEEP = ("running", 9, "time.sleep(60)")


def run(seconds, ranks=4, away=(1,), **more):
    """A run in which all but some ranks wait; their last record came at 1198 s."""
    waiting = Waiting("all_reduce", seconds, tuple(range(ranks)), "0", 5, ((4,),), "Float")
    others = [rank for rank in range(ranks) if rank not in away]
    return history(
        ranks,
        states=dict.fromkeys(others, IN_LINE) | dict.fromkeys(away, ASLEEP),
        waiting=dict.fromkeys(others, waiting),
        **more,
    )


def test_the_panel_says_who_holds_up_whom_after_ten_seconds_and_what_to_do():
    view = run(8.0).view(1199.0)
    assert "for rank 1" not in panel_text(view)
    view = run(8.0).view(1201.0)
    for shown in (words(panel_html(view)), panel_text(view)):
        assert "ranks 0,2-3 wait 11 s in all_reduce (cell line 12) for rank 1, which is in time.sleep (line 9)" in shown
        assert "%ddl where" in shown
        assert "Stop ends the cell" in shown
    assert panel_text(view).index("for rank 1") < panel_text(view).index("Memory")


def test_the_panel_shows_each_ranks_state_and_line_grouped():
    shown = " ".join(panel_text(run(8.0).view(1201.0)).split())
    assert "ranks 0,2-3 wait 11 s in all_reduce cell line 12: dist.all_reduce(x)" in shown
    assert "rank 1 runs cell line 9: time.sleep(60)" in shown
    moment = " ".join(panel_text(run(0.1, away=()).view(1198.1)).split())
    assert "ranks 0-3 run cell line 12" in moment


def test_running_ranks_get_a_row_for_each_line_at_which_they_stay():
    states = {0: ASLEEP, 1: ASLEEP, 2: ("running", 3, "f()"), 3: ("running", 4, "g()")}
    shown = " ".join(panel_text(history(states=states).view(1211.0)).split())
    assert "ranks 0-1 run cell line 9: time.sleep(60)" in shown
    assert "rank 2 runs cell line 3: f()" in shown
    shown = " ".join(panel_text(history(states=states, steps=20).view(1001.0)).split())
    assert "ranks 0-3 run cell lines 3-4,9" in shown


def test_the_sentence_goes_when_they_have_met():
    running = run(20.0)
    assert "for rank 1" in panel_text(running.view(1199.0))
    for rank in range(4):
        running.add(Sample(rank, 99, 1200.0, 3, "r1", "running", 13, "y = x"), now=1200.0)
    shown = panel_text(running.view(1201.0))
    assert "for rank 1" not in shown
    assert ADVICE not in shown


def end(running, *statuses):
    """The ranks are freed and end, with records that no longer tell where they stood."""
    for rank in range(len(statuses)):
        running.add(Sample(rank, 98, 1199.0, 3, "r1", "released", 12, "x"), now=1199.0)
        running.add(Sample(rank, 99, 1200.0, 3, "r1", "idle", last=True), now=1200.0)
    running.finish([Outcome(rank, status) for rank, status in enumerate(statuses)], now=1201.0)
    return still_picture(running.view(1300.0))


def test_nothing_stale_stays_in_the_picture_of_a_cell_that_ended_well_or_failed_by_an_error():
    for statuses in (("ok",) * 4, ("released", "error", "released", "released"), ("dead", "ok", "ok", "ok")):
        still = end(run(20.0), *statuses)
        for shown in (words(still["text/html"]), still["text/plain"]):
            assert "time.sleep" not in shown
            assert "Stop ends the cell" not in shown


def test_a_cell_that_was_stopped_or_freed_keeps_who_waited_for_whom():
    for statuses in (("interrupted",) * 4, ("released", "ok", "released", "released")):
        still = end(run(20.0), *statuses)
        for shown in (words(still["text/html"]), still["text/plain"]):
            assert "ranks 0,2-3 wait 20 s in all_reduce (cell line 12) for rank 1" in shown
            assert "Stop ends the cell" not in shown
    assert "for rank 1" not in end(run(5.0), *("interrupted",) * 4)["text/plain"]


def test_a_released_rank_says_from_what():
    running = run(20.0)
    freed = Waiting("barrier", 3.0, (0, 1, 2, 3), "0", 5, call="ddl.barrier")
    running.finish([Outcome(0, "released", line=12, waiting=freed), Outcome(1, "error", 1.0, "ValueError", "x")])
    assert re.search(r"rank 0 +released from ddl.barrier +cell line 12", panel_text(running.view()))
    assert called(replace(freed, call="", name="")) == "a collective"


def test_a_rank_that_has_ended_the_cell_or_is_not_in_it_is_named_so():
    waiting = Waiting("all_reduce", 20.0, (0, 1, 2), "0", 5)
    running = History(RunInfo("r1", "n", "ddp", 2, started=1000.0), [RankInfo(0), RankInfo(1)])
    running.add(Sample(0, 0, 0.0, 3, "r1", "waiting", 12, "f()", waiting=waiting), now=1020.0)
    running.add(Sample(1, 0, 0.0, 3, "r1", "idle", last=True), now=1020.0)
    shown = panel_text(running.view(1021.0))
    assert "for rank 1, which has ended the cell and rank 2, which is not in this cell" in shown
    assert re.search(r"rank 1 +ended the cell", shown)


class Screen:
    kind = "headless"

    def __init__(self):
        self.told = []

    def display(self, data, display_id=None, *, update=False):
        pass

    def write(self, name, text):
        self.told.append((name, text))


def test_where_nothing_can_be_redrawn_a_situation_is_one_line_once():
    screen, clock = Screen(), [1198.0]
    running = run(0.5)
    panel = Panel(running, screen, lambda: clock[0])
    for second in range(300):
        clock[0] = 1198.0 + second
        panel.tick()
    told = [text for name, text in screen.told if name == "stderr"]
    assert told == [
        f"ranks 0,2-3 wait 10 s in all_reduce (cell line 12) for rank 1, which is in time.sleep (line 9); {ADVICE}\n"
    ]
    assert not any("for rank 1" in text for name, text in screen.told if name == "stdout")
    assert "for rank 1" not in status_line(running.view(1300.0))
    next_step = Waiting("all_reduce", 0.0, (0, 1, 2, 3), "0", 6, ((4,),), "Float")
    for rank in (0, 2, 3):
        running.add(Sample(rank, 99, 0.0, 3, "r1", *IN_LINE, waiting=next_step), now=clock[0])
    clock[0] += 60.0
    panel.tick()
    assert len([name for name, _ in screen.told if name == "stderr"]) == 1


def test_a_panel_of_512_ranks_that_wait_for_one_is_small():
    view = run(20.0, ranks=512, steps=20, per_node=8).view(1100.0)
    html = panel_html(view)
    assert len(html) < 40_000
    assert "ranks 0,2-511 wait" in words(html)


def test_a_quiet_panel_draws_nothing_and_still_says_who_waits_in_vain():
    screen, clock = Screen(), [1199.0]
    screen.display = lambda *_, **__: screen.told.append(("picture", ""))
    running = run(5.0)
    panel = Panel(running, screen, lambda: clock[0], quiet=True)
    for second in range(60):
        clock[0] = 1199.0 + second
        panel.tick()
    panel.freeze()
    ((name, text),) = screen.told
    assert name == "stderr"
    assert "for rank 1, which is in time.sleep (line 9)" in text


def test_the_table_of_the_ranks_names_the_collective():
    fact = {"rank": 0, "host": "n1", "pid": 7, "device": "cpu"}
    shown = plain(status_lines([StatusRow.of(fact, waits()), StatusRow.of(fact, sleeps())]))
    assert "waiting in all_reduce 34 s" in shown
    assert "running 35 s" in shown
