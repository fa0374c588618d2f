"""When a rank dies, or somebody ends the cluster: noticed at once, told once and truly, and mended by a restart."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.notebook import Notebook, alive, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

KILLED = (
    "rank 1 died (signal 9 Killed: somebody or the system killed it); MPI ended rank 0 with it, "
    "and variables on the ranks are lost. %ddl restart starts them again"
)
IN_A_CELL = {
    "os._exit(3)": "rank 1 died (exit code 3: os._exit or sys.exit",
    "import ctypes; ctypes.string_at(0)": "rank 1 died (signal 11 Segmentation fault: a fault in C or C++ code)",
    "from mpi4py import MPI; MPI.COMM_WORLD.Abort(5)": "rank 1 died (MPI_Abort with code 5",
}


@pytest.fixture(scope="module")
def book():
    notebook = Notebook()
    started = notebook.run("%ddl start -n 2 --env DDL_TEST_MARK=kept --timeout 80", timeout=90)
    assert started.ename is None, started.text
    yield notebook
    notebook.close()


@pytest.fixture(autouse=True)
def _ranks_that_live(book):
    if book.run("%ddl status", timeout=20).ename is not None:
        restarted = book.run("%ddl restart", timeout=90)
        assert restarted.ename is None, restarted.text


def pids(book: Notebook) -> list[int]:
    book.run("%%ddl -o pids\nimport os\nos.getpid()")
    return book.value("pids")


def process_of(book: Notebook, word: str) -> int:
    """The process that the kernel itself has started by a command with this word."""
    children = psutil.Process(book.pid).children()
    (found,) = [child.pid for child in children if any(word in part for part in child.cmdline())]
    return found


@pytest.mark.parametrize("code", IN_A_CELL)
def test_a_death_in_a_cell_says_who_how_and_what_it_printed_last(book, code):
    running = pids(book)
    shown = book.run(
        "%%ddl\nimport os, time, torch, torch.distributed as dist\n"
        "print(f'loss {rank}.5', flush=True)\ntime.sleep(0.5)\nbegan = time.time()\n"
        "if rank == 1 and began:\n    print('\\x1b[31mlast words\\x1b[0m', flush=True)\n    time.sleep(0.5)\n"
        f"    {code}\n"
        "dist.all_reduce(torch.ones(1))",
        timeout=20,
    )
    assert shown.ename == "RankDiedError", shown.text
    assert shown.evalue.startswith(IN_A_CELL[code]), shown.evalue
    assert "Traceback" not in shown.text
    below = shown.traceback.splitlines()[1:]
    assert below == ["rank 1 printed last:", "    loss 1.5", "    last words"]
    wait_for(lambda: alive(running) == [], 20, "the other rank")
    for typed in ("%%ddl\n1", "%ddl status", "pids = 1\n%ddl push pids", "%ddl pull began", "%ddl start -n 2"):
        after = book.run(typed, timeout=20)
        assert (after.ename, after.traceback) == ("RankDiedError", f"RankDiedError: {shown.evalue}"), typed
    assert "loss 1.5" in book.run("%ddl log --rank 1").stdout


def test_a_death_while_nothing_runs_is_told_once_under_the_last_cell(book):
    running = pids(book)
    cell = book.send("%%ddl\n'idle now'")
    assert "idle now" in book.result(cell).text
    os.kill(running[0], signal.SIGKILL)
    text = book.late(cell, "rank 0 died (signal 9")
    assert "MPI ended rank 1 with it" in text
    again = book.run("%%ddl\n1", timeout=20)
    assert again.evalue == text.strip()
    assert again.stderr == ""


def test_an_errand_does_not_wait_for_a_rank_that_is_gone(book):
    running = pids(book)
    book.run(
        "class Slow:\n    def __reduce__(self):\n        import time\n        return time.sleep, (20,)\nslow = Slow()"
    )
    push = book.send("%ddl push slow")
    time.sleep(0.3)  # the push may have begun or not
    os.kill(running[1], signal.SIGKILL)
    shown = book.result(push, 15)
    assert shown.ename == "RankDiedError"
    assert shown.evalue == KILLED


@pytest.mark.parametrize(("part", "said"), [
    ("cluster.controller", "the controller of the ranks was ended from outside this notebook (signal 9 Killed"),
    ("ddl_magics.rank.engine", "the launcher of the ranks was ended from outside this notebook (signal 9 Killed"),
])  # fmt: skip
def test_a_cluster_that_somebody_ended_is_noticed_and_not_waited_for(book, part, said):
    running = pids(book)
    cell = book.send("%%ddl\nimport time\nprint('asleep', flush=True)\ntime.sleep(60)")
    book.result(cell, until=lambda shown: "asleep" in shown.stdout)
    os.kill(process_of(book, part), signal.SIGKILL)
    shown = book.result(cell, 15)
    assert shown.ename == "RankDiedError", shown.text
    assert shown.evalue.startswith(said), shown.evalue
    restarted = book.run("%ddl restart", timeout=90)
    assert restarted.ename is None, restarted.text
    assert alive(running) == []
    kept = book.run("%%ddl\nimport os\nos.environ['DDL_TEST_MARK'], world_size")
    assert "('kept', 2)" in kept.text


def test_without_mpi_the_others_live_on_until_they_are_ended_by_the_notebook(book):
    restarted = book.run("%ddl restart --launcher local", timeout=90)
    assert restarted.ename is None, restarted.text
    running = pids(book)
    shown = book.run("%%ddl\nimport os, time\nif rank == 1:\n    os._exit(4)\ntime.sleep(60)", timeout=15)
    assert shown.ename == "RankDiedError"
    assert shown.evalue.startswith("rank 1 died (exit code 4: os._exit or sys.exit")
    assert "rank 0 lives on, but cannot go on without it" in shown.evalue
    assert alive(running) == running[:1]
    assert book.run("%%ddl\n1", timeout=20).evalue == shown.evalue
    assert book.run("%ddl stop").ename is None
    assert alive(running) == []
