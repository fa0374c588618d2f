"""When a cell fails or is stopped: the cell fails in the notebook, says where, and the next one runs."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.notebook import Notebook, alive, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]


def test_an_error_on_one_rank_fails_the_cell_with_its_own_lines(ranks2):
    shown = ranks2.run("%%ddl\nkept = 7\nif rank == 1:\n    raise ValueError('only here')\nkept")
    assert shown.ename == "CellError"
    assert "rank 1 failed in line 4 of the cell with ValueError: only here" in shown.evalue
    assert "raise ValueError('only here')" in shown.traceback
    assert "----> 4" in shown.traceback
    assert "cells.py" not in shown.traceback
    assert "[0] 7" in shown.text
    assert "[0-1] 7" in ranks2.run("%%ddl\nkept").text


def test_identical_tracebacks_show_once(ranks2):
    shown = ranks2.run("%%ddl\n1 / 0")
    assert "ranks 0-1 failed in line 2 of the cell with ZeroDivisionError" in shown.evalue
    assert shown.traceback.count("----> 2 1 / 0") == 1
    assert "On ranks 0-1:" in shown.traceback


def test_an_error_in_a_function_of_an_earlier_cell_names_both_lines(ranks2):
    ranks2.run("%%ddl\ndef divide(x):\n    return 1 / x")
    shown = ranks2.run("%%ddl\ndivide(rank)")
    assert "rank 0 failed in line 3 of In[" in shown.evalue
    assert "return 1 / x" in shown.traceback
    assert "divide(rank)" in shown.traceback


def test_a_cell_that_does_not_parse_fails_in_one_place(ranks2):
    shown = ranks2.run("%%ddl\nx = 1\nif x\n    pass")
    assert shown.ename == "CellError"
    assert "line 3" in shown.evalue
    assert "SyntaxError" in shown.traceback


def test_the_traceback_carries_the_number_of_the_notebook_cell(ranks2):
    shown = ranks2.run("%%ddl\nraise KeyError('x')")
    assert f"Cell In[{shown.number}]" in shown.traceback


def test_exit_in_a_cell_is_refused_and_the_ranks_live_on(ranks2):
    shown = ranks2.run("%%ddl\nexit()")
    assert shown.ename == "CellError"
    assert "%ddl stop" in shown.evalue
    assert "[0-1] 2" in ranks2.run("%%ddl\n1 + 1").text


def test_stop_reaches_plain_python_on_every_rank_and_the_next_cells_run_at_once(ranks2):
    cell = ranks2.send("%%ddl\nprint('looping', flush=True)\nwhile True:\n    pass")
    ranks2.result(cell, until=lambda shown: "looping" in shown.stdout)
    began = time.monotonic()
    ranks2.interrupt()
    shown = ranks2.result(cell)
    assert shown.ename == "KeyboardInterrupt"
    assert time.monotonic() - began < 5
    assert len(shown.text.strip().splitlines()) <= 15
    for number in range(3):
        after = ranks2.run(f"%%ddl\n{number} + rank", timeout=5)
        assert after.ename is None, after.text
        assert f"[1] {number + 1}" in after.text


def test_a_sleeping_cell_stops_too_and_a_timeout_says_so(ranks2):
    shown = ranks2.run("%%ddl --timeout 2\nimport time\ntime.sleep(60)", timeout=20)
    assert shown.ename == "CellError"
    assert "stopped after 2 s" in shown.evalue
    assert ranks2.run("%%ddl\n1", timeout=5).ename is None


def test_the_tensors_of_a_failed_cell_are_free_at_the_next(ranks2):
    ranks2.run(
        "%%ddl\nimport torch, weakref\ndef grow():\n    global watch\n    big = torch.ones(10)\n"
        "    watch = weakref.ref(big)\n    raise MemoryError('full')\ngrow()"
    )
    assert "[0-1] True" in ranks2.run("%%ddl\nwatch() is None").text


def test_a_mistake_is_one_line_that_names_the_nearest_word(ranks2):
    for typed, expected in {
        "%ddl sttaus": "Did you mean 'status'?",
        "%ddl start --rangs 3": "start has no option '--rangs'",
        "%ddl pull nothing_there": "no variable 'nothing_there'",
        "%%ddl --strategi ddp\n1": "Did you mean '--strategy'?",
        "%%ddl --strategy zerro\n1": "Did you mean 'zero'?",
        "%%ddl --strategy zero:4\n1": "4",
        "%%ddl --strategy axonn:3x1x1\n1": "3",
        "%%ddl --ranks 0,7\n1": "no rank 7",
        "%%ddl --ranks 1-0\n1": "not a list of ranks",
        "%%ddl -o class\n1": "not a name",
        "%%ddl --precision fp8\n1": "fp8",
    }.items():
        shown = ranks2.run(typed, timeout=10)
        assert shown.ename, typed
        assert expected in shown.traceback, shown.traceback
        assert "Traceback" not in shown.traceback
        assert len(shown.traceback.strip().splitlines()) == 1, shown.traceback


def test_help_shows_verbs_and_options(ranks2):
    overview = ranks2.run("%ddl help").stdout
    assert all(f"%ddl {verb}" in overview for verb in ("start", "status", "pull", "wait"))
    assert "--nproc-per-node" in ranks2.run("%ddl help start").stdout
    assert "--precision" in ranks2.run("%ddl help ddl").stdout


def test_push_and_pull_move_tensors_arrays_and_functions(ranks2):
    ranks2.run("import numpy as np, torch\nscale = 3\ntable = np.arange(4)\nweights = torch.ones(2, 2)\n"
               "def triple(x):\n    return scale * x")  # fmt: skip
    assert ranks2.run("%ddl push table weights triple").ename is None
    ranks2.run("%%ddl\nanswer = triple(int(table.sum())) + rank\nback = weights * (rank + 1)")
    assert ranks2.run("%ddl pull answer back").ename is None
    assert ranks2.value("answer") == [18, 19]
    assert ranks2.value("[float(tensor.sum()) for tensor in back]") == [4.0, 8.0]
    ranks2.run("%ddl pull answer --rank 1")
    assert ranks2.value("answer") == 19


def test_what_cannot_be_moved_is_one_line(ranks2):
    ranks2.run("import threading\nlock = threading.Lock()")
    shown = ranks2.run("%ddl push lock")
    assert shown.ename == "TransferError"
    assert "'lock'" in shown.evalue
    ranks2.run("%%ddl\nimport threading\ntheirs = threading.Lock()")
    shown = ranks2.run("%ddl pull theirs")
    assert shown.ename == "TransferError"
    assert "rank 0: 'theirs'" in shown.evalue


def test_a_failure_is_told_at_once_while_other_ranks_wait_and_is_the_error_after_a_stop(ranks2):
    cell = ranks2.send(
        "%%ddl\nimport time\nif rank == 1:\n    raise ValueError('the cause')\nwhile True:\n    time.sleep(0.1)"
    )
    told = ranks2.result(cell, 10, until=lambda shown: "the cause" in shown.stderr)
    assert "rank 1 failed in line 4 of the cell with ValueError: the cause" in told.stderr
    assert "rank 0 still" in told.stderr
    ranks2.interrupt()
    shown = ranks2.result(cell, 15)
    assert shown.ename == "CellError"
    assert "rank 1 failed in line 4 of the cell with ValueError: the cause" in shown.evalue
    assert ranks2.run("%%ddl\n1").ename is None


def test_a_rank_that_is_killed_is_noticed_within_two_seconds_and_restart_mends_it():
    book = Notebook()
    try:
        book.run("%ddl start -n 2", timeout=90)
        book.run("%%ddl -o pids\nimport os\nos.getpid()")
        pids = book.value("pids")
        cell = book.send("%%ddl\nimport time\nprint('asleep', flush=True)\ntime.sleep(60)")
        book.result(cell, until=lambda shown: "asleep" in shown.stdout)
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        shown = book.result(cell)
        assert time.monotonic() - began < 4
        assert shown.ename == "RankDiedError"
        assert "rank 1 died (signal 9" in shown.evalue
        assert "%ddl restart" in shown.evalue
        wait_for(lambda: alive(pids) == [], 5, "the other rank")
        assert book.run("%%ddl\n1", timeout=5).ename == "RankDiedError"
        restarted = book.run("%ddl restart", timeout=90)
        assert restarted.ename is None, restarted.text
        assert "[1] 1" in book.run("%%ddl\nrank").text
    finally:
        book.close()


def test_a_cell_of_seventy_seconds_is_not_cut_off(ranks2):
    shown = ranks2.run("%%ddl\nimport time\ntime.sleep(70)\n'slept'", timeout=85)
    assert shown.ename is None
    assert "[0-1] 'slept'" in shown.text
