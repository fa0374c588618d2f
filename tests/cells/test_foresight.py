"""What is said of a cell before it is sent: where it would hang, and silence where it would not."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from ddl_magics.foresight import Foresight


def cells(name: str) -> dict[str, str]:
    """Cells by what they show, from a file beside this one."""
    parts = re.split("^== ", (Path(__file__).parent / name).read_text(), flags=re.MULTILINE)[1:]
    return {title: code.strip("\n") for title, _, code in (part.partition("\n") for part in parts)}


HANG = cells("hang.txt")
"""Each cell behind a line `-> ` with the beginning of what is said of it."""
WELL = cells("well.txt")


def said(code: str, size: int = 2, ranks: list[int] | None = None) -> list[str]:
    return [str(found) for found in Foresight(range(size)).read(f"%%ddl\n{code}", ranks)]


@pytest.mark.parametrize("name", HANG)
@pytest.mark.parametrize("size", [2, 4])
def test_a_cell_that_would_hang_is_told(name, size):
    expected, _, code = HANG[name].removeprefix("-> ").partition("\n")
    found = said(code, size)
    assert any(line.startswith(expected) for line in found), found
    assert len(found) <= 2, found


@pytest.mark.parametrize("name", WELL)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_cell_that_is_well_is_passed_in_silence(name, size):
    assert said(WELL[name], size) == []


@pytest.mark.parametrize("name", [name for name in WELL if "group" in name])
def test_groups_of_many_ranks_are_passed_in_silence_too(name):
    assert said(WELL[name], 16) == []


def test_a_collective_on_some_ranks_only_is_told_and_point_to_point_is_not():
    assert said("x = 1\ndist.barrier()", 4, [0, 2]) == [
        "line 3: dist.barrier needs every rank, and --ranks 0,2 leaves out ranks 1,3; it would wait there for ever"
    ]
    assert "ddl.save" in said("ddl.save('x')", 2, [1])[0]
    assert said("dist.send(x, 2)\ndist.all_reduce(x, group=g)\nprint(dist.get_rank())", 4, [0, 2]) == []
    assert said("dist.barrier()", 2, [0, 1]) == []
    pair = "g = dist.new_group([0, 1], use_local_synchronization=True)\ndist.all_reduce(x, group=g)"
    assert said(pair, 4, [0, 1]) == []
    assert said(pair, 4, [1, 2]) == [
        "line 2: dist.new_group needs ranks 0-1, and --ranks 1,2 leaves out rank 0; it would wait there for ever"
    ]


def test_groups_of_earlier_cells_are_known():
    foresight = Foresight(range(4))
    assert foresight.read("%%ddl\none, two = dist.new_group([0]), dist.new_group([0, 1])") == []
    assert foresight.read("%%ddl\nif rank == 0:\n    dist.all_reduce(x, group=one)") == []
    assert [str(found) for found in foresight.read("%%ddl\nif rank == 0:\n    dist.all_reduce(x, group=two)")] == [
        "line 3: dist.all_reduce is reached only where rank == 0, and would wait there for the other ranks for ever"
    ]
    assert foresight.read("%%ddl\none = two\nif rank == 0:\n    dist.barrier(one)")
    assert foresight.read("%%ddl\ndist.all_reduce(x, group=two)", [2, 3]) == []
    assert "leaves out rank 0" in str(foresight.read("%%ddl\ndist.all_reduce(x, group=two)", [1])[0])


def test_what_earlier_cells_imported_defined_and_decided_is_remembered():
    foresight = Foresight(range(2))
    assert foresight.read("%%ddl\nfrom torch.distributed import all_reduce as ar\nchief = rank == 0\n"
                          "def everybody():\n    print('x')\n    ar(x)") == []  # fmt: skip
    assert [str(found) for found in foresight.read("%%ddl\nif chief:\n    everybody()")] == [
        "line 3: ar (in everybody()) is reached only where chief, and would wait there for the other ranks for ever"
    ]
    assert foresight.read("%%ddl\nchief = True\nif chief:\n    everybody()\nrank = 3") == []
    assert foresight.read("%%ddl\nif rank == 0:\n    ar(x)"), "the rank is put there afresh for each cell"


def test_one_line_for_each_place_and_not_too_many():
    assert [line.split(":")[0] for line in said("if rank == 0:\n" + "    dist.barrier()\n" * 3)] == [
        "line 3", "line 4", "line 5"]  # fmt: skip
    assert len(said("if rank == 0:\n" + "    dist.barrier()\n" * 40)) == 5
    assert (
        len(said("for i in range(3):\n    for j in range(3):\n        if rank == 0:\n            dist.barrier()")) == 1
    )


def test_a_large_world_and_a_large_cell_are_read_at_once():
    began = time.monotonic()
    assert len(said("if rank == 0:\n    dist.barrier()\n" + "x = f(x)[1:]\n" * 400, 256)) == 1
    deep = "for a in b:\n    for c in d:\n        for e in f:\n            for g in h:\n"
    said(deep + (" " * 16 + "if rank == 0: x = [i for i in y for j in z for k in w for m in n]\n") * 200, 256)
    assert time.monotonic() - began < 30


@pytest.mark.mpi
@pytest.mark.timeout(90)
def test_a_warning_stands_above_the_output_and_strict_refuses_the_cell_before_any_rank_works(ranks2):
    shown = ranks2.run(
        "%%ddl\nran = 1\nif rank == 0 and world_size == 3:\n    dist.barrier()\nif rank == -1:\n    ddl.save('x')"
    )
    assert (shown.ename, shown.stderr) == (None, "")
    shown = ranks2.run("%%ddl\ndef late():\n    if rank == 0:\n        ddl.barrier()\nran = 2")
    assert shown.ename is None
    assert shown.stderr.startswith("line 4: ddl.barrier is reached only where rank == 0")
    assert len(shown.stderr.splitlines()) == 1
    shown = ranks2.run("%%ddl --strict\nran = 3\nif rank == 0:\n    ddl.barrier()", timeout=10)
    assert shown.ename == "UsageError"
    assert "line 4: ddl.barrier is reached only where rank == 0" in shown.evalue
    assert len(shown.traceback.splitlines()) == 1
    shown = ranks2.run("%%ddl --ranks 1 --strict\nddl.barrier()", timeout=10)
    assert "--ranks 1 leaves out rank 0" in shown.evalue
    assert "[0-1] 2" in ranks2.run("%%ddl --strict\nif rank == 0:\n    print('fine')\nran").text


@pytest.mark.mpi
@pytest.mark.timeout(60)
def test_single_is_one_process_and_nobody_waits(ranks2):
    shown = ranks2.run("%%ddl --strategy single --strict\nif rank == 0:\n    ddl.barrier()")
    assert (shown.ename, shown.stderr) == (None, "")
