"""`ddl-magics run`: which launcher is taken, what reaches the script, and that all ranks end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddl_magics.cluster import run
from ddl_magics.cluster.mpi import MPI
from ddl_magics.errors import StartError, UsageError
from tests.notebook import alive, wait_for

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]

TELL = """\
import os, sys, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "-1")))
told = os.environ.get("DDL_MAGICS_STRATEGY"), os.environ.get("HERE")
sys.stdout.write(f"rank {rank} {sys.argv[1:]} {' '.join(map(str, told))}\\n")  # print may write a line in two pieces
if "fail" in sys.argv and rank == 1:
    sys.exit(7)
if "hold" in sys.argv or "fail" in sys.argv:
    open(f"{sys.argv[0]}.{rank}", "w").write(str(os.getpid()))
    try:
        time.sleep(100)
    except KeyboardInterrupt:
        open(f"{sys.argv[0]}.{rank}.interrupted", "w").close()
        time.sleep(1)  # so that no rank's end ends the others before they came here
        raise
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TELL)
    return path


def begin(*words: str | Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "ddl_magics.cli", "run", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": ""}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def pids(script: Path, ranks: tuple[int, ...]) -> list[int]:
    """Process ids that the ranks wrote, once they all did."""
    files = [Path(f"{script}.{rank}") for rank in ranks]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), 60, "both ranks")
    return [int(file.read_text()) for file in files]


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_a_script_runs_with_its_own_arguments_and_what_was_said_for_init(script: Path, launcher: str) -> None:
    words = ["-n", "2", "--launcher", launcher, "--strategy", "zero:2", "--env", "HERE=yes", "--", "--epochs", "3"]
    out, err = begin(script, *words).communicate(timeout=60)
    assert sorted(out.splitlines()) == [f"rank {rank} ['--epochs', '3'] zero:2 yes" for rank in range(2)], err
    assert "2 ranks" in err
    assert "train.py --epochs 3" in err


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_a_rank_that_fails_ends_the_others_and_gives_the_exit_status(script: Path, launcher: str) -> None:
    process = begin(script, "-n", "2", "--launcher", launcher, "--", "fail")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7, err
    assert launcher == "mpi" or err.endswith("rank 1 ended with exit status 7; the others are ended too\n")
    other = Path(f"{script}.0")
    assert not other.exists() or alive([int(other.read_text())]) == []


@pytest.mark.mpi
@pytest.mark.parametrize(("launcher", "number"), [("mpi", signal.SIGINT), ("local", signal.SIGTERM)])
def test_an_interrupt_ends_all_ranks(script: Path, launcher: str, number: signal.Signals) -> None:
    process = begin(script, "-n", "2", "--launcher", launcher, "--", "hold")
    ranks = pids(script, (0, 1))
    family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert set(ranks) <= set(family)
    began = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert alive(family) == []
    assert time.monotonic() - began < 15
    told = [Path(f"{script}.{rank}.interrupted").exists() for rank in (0, 1)]
    assert told == [number == signal.SIGINT] * 2


def test_a_rank_that_is_killed_is_named_with_its_signal(script: Path) -> None:
    process = begin(script, "-n", "2", "--launcher", "local", "--", "hold")
    ranks = pids(script, (0, 1))
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 ended by signal 9 (Killed)" in err
    assert alive(ranks) == []


@pytest.mark.mpi
def test_ranks_of_a_launcher_that_is_killed_are_ended(script: Path) -> None:
    process = begin(script, "-n", "2", "--launcher", "mpi", "--", "hold")
    ranks = pids(script, (0, 1))
    family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    (launcher,) = psutil.Process(process.pid).children()
    launcher.kill()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    wait_for(lambda: alive([*family, *ranks]) == [], 10, "the ranks")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none.py"], "there is no script none.py"),
        (["train.py", "--strategy", "zero:9"], "ZeRO has no stage '9'. Valid: zero:1, zero:2, zero:3."),
        (["train.py", "--strategy", "axonn:3x1x1", "-n", "2"], "does not divide the world of 2"),
        (["train.py", "--nnodes", "2"], "several nodes need an allocation with srun"),
        (["train.py", "--launcher", "srun"], "this is no allocation of Slurm"),
        (["train.py", "-n", "0"], "-n 0 is too few"),
        (["train.py", "--env", "A"], "--env A is not of the form NAME=VALUE"),
        (["train.py", "--epochs", "3"], "What the script takes stands after --: ddl-magics run train.py -- --epochs"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    script: Path, words: list[str], says: str, capsys, monkeypatch
) -> None:
    from ddl_magics.cli import main

    monkeypatch.chdir(script.parent)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["run", *words]) == 1
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_of_srun_the_status_is_that_of_the_rank_that_failed_first(script: Path, tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho 'srun: error: n2: task 1: Exited with exit code 7' >&2\nexit 143\n")
    srun.chmod(0o700)
    command = [sys.executable, "-m", "ddl_magics.cli", "run", str(script), "--launcher", "srun"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "1", "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 7
    assert done.stderr.endswith("task 1: Exited with exit code 7\n")


# What is taken


def planned(
    script: Path, monkeypatch, mpi: MPI | None = None, srun: bool = False, environ=None, **wanted
) -> run.Launch:
    def find() -> MPI:
        if mpi is None:
            raise StartError("no mpiexec was found")
        return mpi

    monkeypatch.setattr(run.mpi, "find", find)
    monkeypatch.setattr(run.shutil, "which", lambda name: "/usr/bin/srun" if srun else None)
    monkeypatch.setattr(run, "gpus_here", lambda: 0)
    return run.plan(run.Wanted(str(script), **wanted), environ or {})


OPEN_MPI = MPI("Open MPI", (5, 0, 11), Path("/opt/bin/mpiexec"))
JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "RANK": "3"}


def test_an_allocation_s_srun_comes_first_then_mpi_then_plain_processes(script: Path, monkeypatch) -> None:
    of_job = planned(script, monkeypatch, OPEN_MPI, srun=True, environ=JOB, arguments=("x",))
    assert of_job.by == "8 ranks by srun"
    words = ("srun", "-n", "8", "--mpi=none", "--overlap", "--kill-on-bad-exit=1", sys.executable, str(script), "x")
    assert of_job.commands == (words,)
    assert of_job.environments[0]["SLURM_JOB_ID"] == "7"

    by_mpi = planned(script, monkeypatch, OPEN_MPI, environ=JOB, n=3)
    assert by_mpi.commands == (("/opt/bin/mpiexec", "-n", "3", sys.executable, str(script)),)
    assert not {"SLURM_JOB_ID", "SLURM_PROCID", "RANK"} & set(by_mpi.environments[0])
    assert by_mpi.environments[0]["PRTE_MCA_hwloc_default_binding_policy"] == "none"

    by_hand = planned(script, monkeypatch, environ=JOB, n=3)
    assert by_hand.commands == ((sys.executable, str(script)),) * 3
    assert [one["RANK"] for one in by_hand.environments] == ["0", "1", "2"]
    assert len({one["DDL_MAGICS_JOB"] for one in by_hand.environments}) == 1


def test_how_many_ranks_and_on_which_nodes(script: Path, monkeypatch) -> None:
    job = {name: value for name, value in JOB.items() if name != "SLURM_NTASKS"}
    words = planned(script, monkeypatch, srun=True, environ=job, nnodes=2, nproc_per_node=4).commands[0]
    assert words[:7] == ("srun", "-N", "2", "-n", "8", "--ntasks-per-node", "4")
    assert planned(script, monkeypatch).by == "2 ranks as plain processes"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(UsageError, match="-n 3 is not 1 nodes x --nproc-per-node 2"):
        planned(script, monkeypatch, n=3, nproc_per_node=2)


def test_what_was_said_for_init_travels_as_variables(script: Path, monkeypatch) -> None:
    said = {"strategy": "ddp", "precision": None, "checkpoint_activations": True, "steps": 3, "seed": 0}
    (environment, _) = planned(script, monkeypatch, program=said).environments
    told = {name.removeprefix("DDL_MAGICS_"): value for name, value in environment.items() if "DDL_MAGICS" in name}
    del told["JOB"], told["OWNER"]
    assert told == {"STRATEGY": "ddp", "CHECKPOINT_ACTIVATIONS": "1", "STEPS": "3", "SEED": "0"}
