"""`ddl-magics` in a terminal: status, log and stop of a cluster that a notebook owns."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.notebook import Notebook, alive, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def terminal(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ddl_magics.cli", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_without_ranks_every_word_says_so_in_one_line():
    for word in ("status", "where", "log", "stop"):
        said = terminal(word)
        assert said.returncode == 1
        assert (
            said.stderr
            == "ddl-magics: no ranks of yours are running on this machine. A notebook starts them by %ddl start\n"
        )


def test_a_terminal_sees_and_ends_ranks_while_a_cell_blocks_the_kernel():
    book = Notebook()
    try:
        assert book.run("%ddl start -n 2", timeout=90).ename is None
        pids = [child.pid for child in psutil.Process(book.pid).children(recursive=True)]
        cell = book.send("%%ddl\nimport time\nprint('to be logged', flush=True)\ntime.sleep(600)")
        book.result(cell, until=lambda shown: "to be logged" in shown.stdout)
        status = terminal("status")
        assert status.returncode == 0, status.stderr
        assert status.stdout.count("running") == 2
        assert "time.sleep(600)" in status.stdout
        assert "to be logged" in terminal("log", "--rank", "1").stdout
        assert "there is no cluster 'ddl-none'" in terminal("status", "ddl-none").stderr
        stopped = terminal("stop")
        assert "2 ranks stopped" in stopped.stdout
        wait_for(lambda: alive(pids) == [], 5, "processes of the cluster")
        shown = book.result(cell, 20)
        assert shown.ename == "RankDiedError"
        assert "the ranks were stopped from outside this notebook, by ddl-magics stop" in shown.evalue
        restarted = book.run("%ddl restart", timeout=90)
        assert restarted.ename is None, restarted.text
        assert "[1] 1" in book.run("%%ddl\nrank").text
    finally:
        book.close()


def test_ranks_that_are_kept_outlive_the_kernel_until_a_terminal_ends_them():
    book = Notebook()
    started = book.run("%ddl start -n 2 --launcher local --keep", timeout=90)
    pids = [child.pid for child in psutil.Process(book.pid).children(recursive=True)]
    book.close()
    assert started.ename is None, started.text
    status = terminal("status")
    assert status.stdout.count("idle") == 2, status
    assert "2 ranks stopped" in terminal("stop").stdout
    wait_for(lambda: alive(pids) == [], 5, "processes of the cluster")
