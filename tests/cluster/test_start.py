"""`%ddl start` and `stop`: on a hostile machine, more than once, and without a trace."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from pathlib import Path

import psutil
import pytest

from tests.notebook import Notebook, alive, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

WORLD = (
    "%%ddl\nimport torch.distributed as dist, torch\nt = torch.ones(1)\ndist.all_reduce(t)\n(rank, world_size, int(t))"
)


def clusters() -> list[Path]:
    return sorted((Path(os.environ["JUPYTER_RUNTIME_DIR"]) / "ddl_magics").glob("ddl-*"))


def family(book: Notebook) -> list[int]:
    """Every process that the notebook's kernel has started."""
    return [child.pid for child in psutil.Process(book.pid).children(recursive=True)]


@pytest.fixture
def book(tmp_path):
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    hostile = {
        "SLURM_JOB_ID": "999999", "SLURM_NTASKS": "64", "SLURM_NODELIST": "nowhere[1-9]", "SLURM_NNODES": "9",
        "SLURM_TASKS_PER_NODE": "8(x8)", "SLURM_PROCID": "7", "PMI_RANK": "3", "PMI_SIZE": "8", "PMI_FD": "77",
        "PMIX_RANK": "5", "PMIX_NAMESPACE": "nobody", "PMIX_SERVER_URI2": "tcp4://127.0.0.1:1",
        "PBS_JOBID": "12", "PBS_NODEFILE": "/nowhere", "LSB_JOBID": "1",
    }  # fmt: skip
    notebook = Notebook(cwd=folder, env=hostile)
    yield notebook
    notebook.close()


def test_ranks_come_up_in_a_hostile_environment_and_are_gone_after_stop(book, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        before = set(clusters())
        started = book.run("%ddl start -n 2", timeout=90)
        assert started.ename is None, started.text
        last = started.stdout.replace("\r", "\n").strip().splitlines()[-1]
        assert last.startswith("2 ranks on ")
        assert "cpu" in last
        assert "gloo" in last
        shown = book.run(
            WORLD + "\nimport os\nprint(rank, world_size, int(t), os.getcwd(), os.environ.get('SLURM_JOB_ID'))"
        )
        where = str(tmp_path / "a folder with spaces")
        assert f"[0] 0 2 2 {where} None" in shown.text
        assert f"[1] 1 2 2 {where} None" in shown.text
    pids = family(book)
    assert len(pids) > 4
    (folder,) = set(clusters()) - before
    private = [folder, folder / "cluster.json", *folder.glob("security/*.json"), *folder.glob("output/*")]
    assert len(private) >= 4
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    secret = json.loads(next(folder.glob("security/*client.json")).read_text())["key"]
    for pid in pids:
        process = psutil.Process(pid)
        assert secret not in " ".join(process.cmdline())
        assert secret not in str(process.environ())
    stopped = book.run("%ddl stop")
    assert "2 ranks stopped" in stopped.stdout
    assert alive(pids) == []
    assert not folder.exists()
    assert book.run("%ddl stop").ename == "NoClusterError"


def test_more_ranks_than_cores_the_same_start_again_and_a_different_one(book):
    assert book.run("%ddl start -n 4", timeout=90).ename is None
    pids = family(book)
    assert "[0] (0, 4, 4)" in book.run(WORLD).text
    again = book.run("%ddl start -n 4")
    assert again.ename is None
    assert "already running" in again.stdout
    assert alive(pids) == pids
    book.run("import torch")  # a kernel that has imported torch is no worse a place to start from
    other = book.run("%ddl start -n 2")
    assert other.ename == "UsageError"
    assert "%ddl restart" in other.evalue
    restarted = book.run("%ddl restart -n 2", timeout=90)
    assert restarted.ename is None, restarted.text
    assert alive(pids) == []
    assert "[1] (1, 2, 2)" in book.run(WORLD).text


def test_two_notebooks_have_ranks_at_the_same_time(book):
    other = Notebook()
    try:
        first, second = book.send("%ddl start -n 2"), other.send("%ddl start -n 2")
        for shown in (book.result(first, 90), other.result(second, 90)):
            assert shown.ename is None, shown.text
        book.run("%%ddl\nmine = 'first'")
        other.run("%%ddl\nmine = 'second'")
        assert "[0-1] 'first'" in book.run("%%ddl\nmine").text
        assert "[0-1] 'second'" in other.run("%%ddl\nmine").text
    finally:
        other.close()


def test_the_first_cell_after_a_start_runs_exactly_once_on_every_rank(book, tmp_path):
    counter = tmp_path / "count"
    start = book.send("%ddl start -n 2")
    cell = book.send(f"%%ddl\nwith open({str(counter)!r} + str(rank), 'a') as file:\n    file.write('x')")
    book.result(start, 90)
    book.result(cell)
    assert [Path(f"{counter}{rank}").read_text() for rank in range(2)] == ["x", "x"]


def test_without_mpi_ranks_are_plain_processes(book):
    started = book.run("%ddl start -n 2 --launcher local", timeout=90)
    assert started.ename is None, started.text
    assert not [p for p in family(book) if "mpiexec" in psutil.Process(p).name()]
    shown = book.run(WORLD)
    assert "[0] (0, 2, 2)" in shown.text
    assert "[1] (1, 2, 2)" in shown.text
    pids = family(book)
    book.run("%ddl stop")
    assert alive(pids) == []


def fake_mpiexec(folder: Path, script: str) -> dict[str, str]:
    """An environment in which `mpiexec` is this script."""
    folder.mkdir()
    program = folder / "mpiexec"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_an_mpiexec_of_another_mpi_is_refused_with_the_remedy(tmp_path, monkeypatch):
    from ddl_magics.cluster import mpi
    from ddl_magics.errors import StartError

    env = fake_mpiexec(tmp_path / "bin", "echo 'HYDRA build details: Version: 4.1.2'")
    monkeypatch.setenv("PATH", env["PATH"])
    monkeypatch.setattr(sys, "executable", sys.executable)
    monkeypatch.setattr(mpi, "candidates", lambda: [tmp_path / "bin" / "mpiexec"])
    with pytest.raises(StartError, match=r"mpi4py uses Open MPI .* is MPICH"):
        mpi.find()
    monkeypatch.setattr(mpi, "candidates", list)
    with pytest.raises(StartError, match=r"no mpiexec .*ddl-magics\[mpi\]"):
        mpi.find()


def test_ranks_that_do_not_see_one_another_are_refused(tmp_path):
    """What an mpiexec of another MPI does: n processes that each are a world of one, without a word."""
    script = (
        'case "$1" in --version) echo "mpiexec (Open MPI) 5.0.11"; exit;; esac\n'
        'n=$2; shift 2\nfor i in $(seq $n); do "$@" & done\ntrap "kill $(jobs -p)" TERM\nwait'
    )
    book = Notebook(env=fake_mpiexec(tmp_path / "bin", script))
    try:
        shown = book.run("%ddl start -n 2", timeout=90)
        assert shown.ename == "StartError"
        assert "worlds of [1] instead of 2" in shown.traceback
        assert "ddl-magics[mpi]" in shown.traceback
        wait_for(lambda: family(book) == [], 15, "processes of a refused start")
    finally:
        book.close()


def test_a_start_that_fails_shows_what_the_launcher_said_and_leaves_no_process(tmp_path):
    script = (
        'case "$1" in --version) echo "mpiexec (Open MPI) 5.0.11";; '
        '*) echo "There are not enough slots available in the system" >&2; exit 1;; esac'
    )
    book = Notebook(env=fake_mpiexec(tmp_path / "bin", script))
    try:
        before = clusters()
        shown = book.run("%ddl start -n 2", timeout=60)
        assert shown.ename == "StartError"
        assert "There are not enough slots available in the system" in shown.traceback
        assert "fewer slots than ranks" in shown.traceback
        assert "cluster.py" not in shown.traceback
        wait_for(lambda: family(book) == [], 10, "processes of a failed start")
        assert clusters() == before
        assert book.run("%%ddl\n1").ename == "NoClusterError"
    finally:
        book.close()


def test_ranks_that_never_connect_are_given_up_after_the_timeout_and_killed(tmp_path):
    script = 'case "$1" in --version) echo "mpiexec (Open MPI) 5.0.11";; *) exec sleep 600;; esac'
    book = Notebook(env=fake_mpiexec(tmp_path / "bin", script))
    try:
        shown = book.run("%ddl start -n 2 --timeout 3", timeout=60)
        assert shown.ename == "StartError"
        assert "0 of 2 ranks connected within 3 s" in shown.traceback
        wait_for(lambda: family(book) == [], 10, "processes of a failed start")
    finally:
        book.close()


def test_an_interrupt_during_the_start_leaves_no_process(book):
    start = book.send("%ddl start -n 2")
    wait_for(lambda: len(family(book)) > 3, 30, "processes of the start")
    book.interrupt()
    assert book.result(start, 60).ename == "KeyboardInterrupt"
    wait_for(lambda: family(book) == [], 10, "processes of an interrupted start")
    assert book.run("%ddl start -n 2", timeout=90).ename is None


def test_an_interrupt_during_the_stop_waits_until_all_processes_are_gone(book):
    assert book.run("%ddl start -n 2", timeout=90).ename is None
    pids = family(book)
    stop = book.send("%ddl stop")
    wait_for(lambda: alive(pids) != pids, 10, "the stop to begin")
    book.interrupt()
    book.result(stop, 30)
    assert alive(pids) == []
    assert book.run("%ddl stop").ename == "NoClusterError"


def test_what_cannot_run_is_refused_before_any_rank_starts(book):
    assert book.run("%ddl start -n 2 --strategy axonn:3x1x1", timeout=10).ename == "SpecError"
    assert family(book) == []


def test_a_killed_kernel_takes_its_ranks_with_it_within_30_seconds(tmp_path):
    book = Notebook()
    assert book.run("%ddl start -n 2", timeout=90).ename is None
    pids = family(book)
    book.kill()
    wait_for(lambda: alive(pids) == [], 30, "ranks of a killed kernel")


def test_a_kernel_that_is_shut_down_ends_its_ranks(tmp_path):
    book = Notebook()
    assert book.run("%ddl start -n 2", timeout=90).ename is None
    pids = family(book)
    book.close()
    wait_for(lambda: alive(pids) == [], 15, "ranks of a kernel that was shut down")
