"""The promises about failure and Stop with 4 and with 8 ranks: few lines, the true cause, every rank back."""

from __future__ import annotations

import pytest

from tests.cells.scenarios import AFTER, SCENARIOS, SETUP, are_here, check_after, check_failure
from tests.notebook import Notebook

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(180)]

NAMES = ("all_reduce", "a subgroup", "an autograd hook under DDP")


@pytest.fixture(scope="module", params=[4, 8])
def crowd(request):
    book = Notebook()
    shown = book.run(f"%ddl start -n {request.param}", timeout=120)
    assert shown.ename is None, shown.text
    assert book.run(SETUP, timeout=60).ename is None
    yield book, request.param
    book.close()


def test_the_rank_that_failed_is_blamed_and_all_others_are_free(crowd):
    book, n = crowd
    for scenario in [scenario.by(n - 2) for scenario in SCENARIOS if scenario.name in NAMES]:
        shown = book.run(scenario.cell(), timeout=60)
        check_failure(scenario, shown.ename, shown.text)
        assert f"freed: ranks 0-{n - 3},{n - 1} in {scenario.freed}" in shown.evalue
        check_after(book.run(AFTER, timeout=30).text, n)


def test_ranks_in_subgroups_that_know_nothing_of_the_failure_are_freed_too(crowd):
    book, n = crowd
    shown = book.run(
        "%%ddl\nhalves = [dist.new_group(everybody[: world_size // 2]), dist.new_group(everybody[world_size // 2 :])]\n"
        "if rank == 1:\n    raise ValueError('in one half')\nif rank < world_size // 2:\n"
        "    dist.barrier(halves[0])\nelse:\n    dist.recv(torch.ones(1), src=1)",
        timeout=30,
    )
    assert "rank 1 failed in line 4 of the cell with ValueError: in one half" in shown.evalue
    assert f"ranks {n // 2}-{n - 1} in recv, line 8" in shown.evalue
    check_after(book.run(AFTER, timeout=30).text, n)


def test_stop_takes_at_most_fifteen_lines_and_the_next_cell_runs_on_all(crowd):
    book, n = crowd
    cell = book.send("%%ddl\nprint('here', flush=True)\ndist.recv(torch.ones(1), (rank + 1) % world_size)")
    book.result(cell, 20, until=lambda shown: are_here(shown.stdout, n))
    book.interrupt()
    shown = book.result(cell, 30)
    assert shown.ename == "KeyboardInterrupt", shown.text
    assert len([line for line in f"{shown.stderr}\n{shown.traceback}".splitlines() if line.strip()]) <= 15
    check_after(book.run(AFTER, timeout=30).text, n)
