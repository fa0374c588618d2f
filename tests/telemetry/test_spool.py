"""The full output of every rank on disk."""

from __future__ import annotations

import stat
import subprocess
import sys

import pytest

from ddl_magics.telemetry.spool import ENTRY, OPEN_RANKS, TAIL, Spool

pytestmark = pytest.mark.timeout(60)


def test_everything_comes_back_by_rank_and_cell_in_order(tmp_path):
    spool = Spool(tmp_path / "out")
    spool.write(0, 1, "stdout", "one\n")
    spool.write(0, 1, "stderr", "warning\r100%\n")
    spool.write(1, 1, "stdout", "other, no newline")
    spool.write(0, 2, "stdout", "two — ü\n")
    spool.write(0, 1, "stdout", "late\n")
    assert spool.read(0) == "one\nwarning\r100%\ntwo — ü\nlate\n"
    assert spool.read(0, cell=1) == "one\nwarning\r100%\nlate\n"
    assert spool.read() == ("--- rank 0 ---\none\nwarning\r100%\ntwo — ü\nlate\n--- rank 1 ---\nother, no newline\n")
    assert [(r.cell, r.name) for r in spool.records(0)] == [(1, "stdout"), (1, "stderr"), (2, "stdout"), (1, "stdout")]
    assert (spool.ranks(), spool.cells(0)) == ([0, 1], [1, 2])
    assert spool.read(5) == ""


def test_files_are_private(tmp_path):
    spool = Spool(tmp_path / "out")
    spool.write(0, 1, "stdout", "x")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").iterdir()} == {0o600}


def test_text_of_any_kind_and_size_survives(tmp_path):
    spool = Spool(tmp_path)
    text = "ü\x00\x1b[31m" + "é" * 700_000
    spool.write(0, 1, "stdout", text)
    assert spool.read(0) == text
    spool.write(1, 1, "stdout", "lone \udc80 surrogate")
    assert "surrogate" in spool.read(1)


def test_another_process_reads_while_this_one_writes(tmp_path):
    spool = Spool(tmp_path)
    spool.write(3, 1, "stdout", "seen\n")
    code = "import sys; from ddl_magics.telemetry.spool import Spool; print(Spool(sys.argv[1]).read(3), end='')"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "seen\n"


def test_half_an_entry_is_left_for_later(tmp_path):
    spool = Spool(tmp_path)
    spool.write(0, 1, "stdout", "whole")
    with (tmp_path / "rank-0.index").open("ab") as index:
        index.write(b"\0" * (ENTRY.size - 1))
    assert spool.read(0) == "whole"
    assert spool.cells(0) == [1]


def test_the_tail_is_what_the_rank_printed_last_and_no_traceback(tmp_path):
    spool = Spool(tmp_path)
    assert spool.tail(0) == ""
    for number in range(TAIL):
        spool.write(0, 1, "stdout", f"{number}\n")
    spool.write(0, 1, "traceback", "RuntimeError: Connection closed by peer\n")
    spool.write(0, 2, "stderr", "last words\n")
    with (tmp_path / "rank-0.index").open("ab") as index:
        index.write(b"\0")
    assert spool.tail(0, size=15) == "255\nlast words\n"
    assert spool.tail(0).startswith("2\n3\n")
    assert "Connection closed by peer" in spool.read(0)


def test_many_ranks_need_few_open_files(tmp_path):
    spool = Spool(tmp_path)
    for _ in range(2):
        for rank in range(OPEN_RANKS + 20):
            spool.write(rank, 1, "stdout", f"{rank}\n")
    assert len(spool._open) == OPEN_RANKS
    assert spool.read(0) == "0\n0\n"
    spool.close()
    spool.write(0, 1, "stdout", "again\n")
    assert spool.read(0) == "0\n0\nagain\n"


def test_a_disk_that_fails_stops_the_spool_with_a_sentence_not_the_cell(tmp_path):
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file" / "out")
    spool.write(0, 1, "stdout", "x")
    assert "no longer kept" in spool.failed
    spool.write(0, 1, "stdout", "y")
    assert spool.ranks() == []
