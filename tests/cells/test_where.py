"""Where every rank is, of real ranks: in the notebook while a cell runs, from a terminal, and on the panel."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.notebook import wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]

HELD_UP = """%%ddl --bg
import os, time, torch, torch.distributed as dist
def late():
    while not os.path.exists({path!r}):
        time.sleep(0.2)
x = torch.ones(4)
if rank == 1:
    late()
dist.all_reduce(x)
x[0].item()"""

MISMATCH = """%%ddl
import torch, torch.distributed as dist
x = torch.ones(4)
if rank == 0:
    dist.all_reduce(x)
else:
    dist.broadcast(x, 0)"""


def terminal(*words: str) -> str:
    said = subprocess.run(
        [sys.executable, "-m", "ddl_magics.cli", *words], capture_output=True, text=True, timeout=60, check=False
    )
    return said.stdout + said.stderr


def test_ranks_that_are_idle_say_so_and_a_rank_that_is_not_there_is_one_line(ranks2):
    shown = ranks2.run("%ddl where")
    assert shown.ename is None, shown.text
    assert "ranks 0-1: idle" in shown.text
    assert "there is no rank 7" in ranks2.run("%ddl where --rank 7").traceback
    assert "--ful" in ranks2.run("%ddl where --ful").traceback


def test_while_a_cell_runs_each_rank_says_its_line_and_who_waits_for_whom(ranks2, tmp_path):
    path = tmp_path / "go"
    ranks2.run(HELD_UP.format(path=str(path)))
    seen = []

    def rank_0_waits() -> bool:
        seen.append(ranks2.run("%ddl where"))
        return "rank 0 wait" in seen[-1].text and "rank 1: time.sleep" in seen[-1].text

    wait_for(rank_0_waits, 30, "rank 0 in its collective")
    shown = seen[-1]
    assert "in all_reduce (cell line 9) for rank 1, which is in time.sleep (line 5)" in shown.text
    assert "rank 0: all_reduce, cell line 9: dist.all_reduce(x)" in shown.text
    assert "rank 1: time.sleep, cell line 5: time.sleep(0.2)" in shown.text
    assert "cell line 8: late()" in shown.text
    assert {"text/html", "text/plain"} == set(shown.displays[-1])
    assert "torch/distributed" in ranks2.run("%ddl where --full --rank 0").text
    from_terminal = terminal("where")
    assert "for rank 1, which is in time.sleep (line 5)" in from_terminal
    assert "rank 0: all_reduce, cell line 9" in from_terminal
    only = terminal("where", "--rank", "1")
    assert "cell line 8: late()" in only
    assert "rank 0: " not in only
    assert "there is no rank 2" in terminal("where", "--rank", "2")
    path.touch()
    ended = ranks2.run("%ddl wait")
    assert ended.ename is None, ended.text
    assert "ranks 0-1: idle" in ranks2.run("%ddl where").text


def test_ranks_in_different_collectives_are_told_on_the_panel_after_ten_seconds_and_stop_ends_them(ranks2):
    cell = ranks2.send(MISMATCH, allow_stdin=False)
    told = ranks2.result(cell, 30, until=lambda shown: "never meet" in shown.stderr)
    assert "rank 0 is in all_reduce (line 5), rank 1 in broadcast (line 7)" in told.stderr
    assert "Stop ends the cell" in told.stderr
    ranks2.interrupt()
    shown = ranks2.result(cell, 15)
    assert shown.ename == "KeyboardInterrupt", shown.text
    assert "rank 0 is in all_reduce (line 5), rank 1 in broadcast (line 7)" in shown.displays[-1]["text/plain"]
    after = ranks2.run("%%ddl\nimport torch.distributed as dist\ny = torch.ones(1)\ndist.all_reduce(y)\ny.item()")
    assert "[0-1] 2.0" in after.text
