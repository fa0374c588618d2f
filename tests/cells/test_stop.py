"""Stop and `--timeout`: step by step, each one line, until every rank is free; the next cells run on all ranks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from tests.cells.scenarios import AFTER, SETUP, are_here, check_after
from tests.notebook import Notebook, alive, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]

STUCK = {
    "every rank waits for a message": "dist.recv(torch.ones(1), (rank + 1) % world_size)",
    "different collectives": "if rank == 0:\n    dist.all_reduce(torch.ones(3))\nelse:\n    dist.barrier()",
    "one in a loop": "while rank == 1:\n    time.sleep(0.01)\ndist.barrier()",
    "a key of the store": "dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])).get('never')",
    "backward under ddp": "model = ddl.prepare(torch.nn.Linear(8, 8))\nloss = model(torch.ones(2, 8)).sum()\n"
    "time.sleep(60 * rank)\nddl.backward(loss)",
}


@pytest.fixture(scope="module")
def ready(ranks2):
    shown = ranks2.run(f"{SETUP}\nimport os\nddl.prepare(torch.nn.Linear(8, 8))")
    assert shown.ename is None, shown.text
    patience(ranks2, 1.5)
    return ranks2


def patience(book: Notebook, seconds: float) -> None:
    """How long ranks wait for one that cannot come: 10 s, of which tests wait once."""
    assert book.run(f"from ddl_magics import waits\nwaits.PATIENCE_S = {seconds}").ename is None


def stop_once_it_runs(book: Notebook, code: str, *, presses: int = 1):
    """Start a cell, and press Stop when all ranks have said that they are in it."""
    cell = book.send(f"%%ddl\nprint('here', flush=True)\n{code}")
    book.result(cell, 20, until=lambda shown: are_here(shown.stdout, 2))
    for press in range(presses):
        if press:
            book.result(cell, 20, until=lambda shown: "interrupting" in shown.stderr)
        book.interrupt()
    began = time.monotonic()
    return book.result(cell, 30), time.monotonic() - began


@pytest.mark.parametrize("code", STUCK.values(), ids=STUCK.keys())
def test_stop_frees_ranks_that_wait_in_different_places(ready, code):
    shown, seconds = stop_once_it_runs(ready, code)
    assert shown.ename == "KeyboardInterrupt", shown.text
    assert seconds < 8
    assert shown.stderr.count("interrupting rank") == 1, shown.stderr
    check_after(ready.run(AFTER, timeout=20).text, 2)
    for number in range(2):
        assert f"[1] {number + 1}" in ready.run(f"%%ddl\n{number} + rank", timeout=5).text


def test_a_second_press_hurries_and_corrupts_nothing(ready):
    shown, seconds = stop_once_it_runs(ready, STUCK["every rank waits for a message"], presses=2)
    assert shown.ename == "KeyboardInterrupt", shown.text
    assert seconds < 4
    assert "closing the collectives of ranks 0-1" in shown.stderr
    check_after(ready.run(AFTER, timeout=20).text, 2)


def test_interrupts_at_any_moment_leave_ranks_that_work(ready):
    """Also those that come while a rank takes a message, tells its outcome or shows a traceback."""
    ready.run("%%ddl -o pids\nimport os\nos.getpid()")
    pids, over = ready.value("pids"), threading.Event()

    def storm():
        while not over.wait(random.uniform(0, 0.02)):
            for pid in pids:
                os.kill(pid, signal.SIGINT)

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        enames = {ready.run("%%ddl --no-panel\nfor _ in range(3):\n    time.sleep(0.002)").ename for _ in range(20)}
    finally:
        over.set()
        thread.join()
    assert enames <= {None, "KeyboardInterrupt", "CellError"}  # nobody pressed Stop, so that a rank may have failed
    check_after(ready.run(AFTER, timeout=20).text, 2)


def test_an_error_that_a_collective_in_finally_hides_is_told_after_stop(ready):
    shown, _ = stop_once_it_runs(
        ready,
        "try:\n    if rank == 1:\n        raise ValueError('hidden')\n    dist.all_reduce(torch.ones(3))\n"
        "finally:\n    dist.barrier()",
    )
    assert shown.ename == "KeyboardInterrupt", shown.text
    assert "rank 1 had met ValueError: hidden in line 5 of the cell" in shown.evalue
    check_after(ready.run(AFTER, timeout=20).text, 2)


def test_a_program_that_interrupts_itself_has_failed(ready):
    shown = ready.run("%%ddl\nif rank == 1:\n    raise KeyboardInterrupt\ndist.barrier()", timeout=20)
    assert shown.ename == "CellError"
    assert "rank 1 failed in line 3 of the cell with KeyboardInterrupt" in shown.evalue
    check_after(ready.run(AFTER, timeout=20).text, 2)


@pytest.mark.parametrize("presses", [1, 2, 5])
def test_stop_during_a_recovery_leaves_ranks_that_work(ready, presses):
    ready.run("%%ddl\nmodel = ddl.prepare(torch.nn.Linear(8, 8))")
    assert ready.run("%%ddl\nif rank == 1:\n    1 / 0\ndist.barrier()", timeout=20).ename == "CellError"
    cell = ready.send("%%ddl\nprint(1)")
    for _ in range(presses):
        time.sleep(0.1)  # at no moment in particular: a recovery takes a few tenths of a second
        ready.interrupt()
    assert ready.result(cell, 30).ename in {None, "KeyboardInterrupt"}
    check_after(ready.run(AFTER, timeout=30).text, 2)
    assert ready.run("%%ddl\nmodel(torch.ones(1, 8)).sum()").ename is None


def test_a_timeout_takes_the_same_steps_and_says_where_each_rank_was(ready):
    shown = ready.run("%%ddl --timeout 2\nif rank == 0:\n    dist.barrier()\nelse:\n    time.sleep(60)", timeout=20)
    assert shown.ename == "CellError"
    assert "stopped after 2 s, rank 0 in barrier, line 3; rank 1 in time.sleep(60), line 5" in shown.evalue
    check_after(ready.run(AFTER, timeout=20).text, 2)


def test_ranks_that_wait_for_one_that_has_ended_the_cell_are_freed(ready):
    patience(ready, 10.0)
    shown = ready.run("%%ddl\nif rank == 1:\n    ddl.barrier()", timeout=25)
    patience(ready, 1.5)
    assert shown.ename == "CellError"
    assert "rank 1 in ddl.barrier, line 3 waited in vain: rank 0 ended the cell without it" in shown.evalue
    assert 10 <= shown.seconds < 15
    check_after(ready.run(AFTER, timeout=20).text, 2)


def test_a_call_of_the_context_is_freed_from_ranks_that_are_in_another_collective(ready):
    shown = ready.run("%%ddl\nif rank == 1:\n    ddl.all_gather(1)\nelse:\n    dist.barrier()", timeout=25)
    assert shown.ename == "CellError"
    assert "rank 1 in ddl.all_gather, line 3" in shown.evalue
    check_after(ready.run(AFTER, timeout=20).text, 2)


def test_tensors_that_do_not_fit_are_named(ready):
    shown = ready.run("%%ddl\ndist.all_reduce(torch.ones(3 + rank))", timeout=25)
    assert shown.ename == "CellError"
    assert "rank 0 made all_reduce of (3,) Float, not all_reduce of (4,) Float" in shown.evalue
    check_after(ready.run(AFTER, timeout=20).text, 2)


def test_stop_during_push_pull_and_a_stop_leaves_a_notebook_that_works(ready):
    ready.run(
        "%%ddl\nclass Slowly:\n    def __reduce__(self):\n        time.sleep(3)\n        return int, (7,)\n"
        "slow = Slowly()"
    )
    cell = ready.send("%ddl pull slow")
    time.sleep(0.5)  # no sign tells that it has begun on the ranks
    ready.interrupt()
    assert ready.result(cell, 20).ename == "KeyboardInterrupt"
    check_after(ready.run(AFTER, timeout=20).text, 2)


def test_the_ranks_can_be_stopped_while_one_is_in_a_collective():
    book = Notebook()
    try:
        book.run("%ddl start -n 2", timeout=90)
        book.run("%%ddl -o pids\nimport os, time\nimport torch, torch.distributed as dist\nos.getpid()")
        pids = book.value("pids")
        book.run("%%ddl --bg\nif rank == 0:\n    dist.barrier()\ntime.sleep(60)")
        wait_for(lambda: "waiting in barrier" in book.run("%ddl status").text)
        stopped = book.run("%ddl stop", timeout=20)
        assert "2 ranks stopped" in stopped.stdout
        assert stopped.seconds < 10
        assert alive(pids) == []
    finally:
        book.close()


def test_a_rank_in_code_that_nothing_interrupts_is_named_and_restart_mends_it(ready):
    blocking = (
        "import ctypes\nif rank == 1:\n    lock = ctypes.create_string_buffer(64)\n"
        "    for _ in range(2):\n        ctypes.CDLL(None).pthread_mutex_lock(lock)"
    )
    shown, _ = stop_once_it_runs(ready, blocking)
    assert "rank 1 does not answer, in line 7: ctypes.CDLL(None).pthread_mutex_lock(lock)" in shown.stderr
    assert "rank 1 did not stop; %ddl restart" in shown.evalue
    busy = ready.run("%%ddl\n1", timeout=5)
    assert busy.ename == "BusyError"
    assert "%ddl restart" in busy.evalue
    assert ready.run("%ddl restart", timeout=60).ename is None
    assert "[1] 2" in ready.run("%%ddl\nrank + 1", timeout=10).text
