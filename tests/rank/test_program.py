"""`ddl_magics.init` in a plain program, under each launcher that this machine has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.strategies.ranks import ENVIRONMENT, ROOT

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]
PROGRAM = str(Path(__file__).parent / "program.py")
BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MPIEXEC = [str(BIN / "mpiexec"), "-n", "2", sys.executable]
ALONE = [sys.executable]


def run(launcher, strategy, **variables):
    done = subprocess.run(
        [*launcher, PROGRAM, strategy],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **variables},
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


@pytest.fixture(scope="module")
def alone():
    return run(ALONE, "single")


@pytest.mark.parametrize(
    ("launcher", "strategy", "ranks"),
    [
        pytest.param(TORCHRUN, "ddp", 2, id="torchrun"),
        pytest.param(MPIEXEC, "ddp", 2, id="mpiexec"),
        pytest.param(MPIEXEC, "single", 1, id="single under mpiexec"),
        pytest.param(ALONE, "ddp", 1, id="alone"),
    ],
)
def test_the_losses_are_those_of_one_process_under_every_launcher(alone, launcher, strategy, ranks):
    found = run(launcher, strategy)
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert found["places"] == [[rank, ranks, rank, ranks, 0, 1] for rank in range(ranks)]
    assert not {"IPython", "ipyparallel", "mpi4py", "ipykernel"} & set(found["modules"])


def test_hostile_variables_of_a_scheduler_change_nothing(alone):
    hostile = {"SLURM_PROCID": "5", "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "9", "PMI_RANK": "3", "PMI_SIZE": "7"}
    found = run(MPIEXEC, "ddp", **hostile, SLURM_JOB_ID="1", SLURM_STEP_ID="0")
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.slurm
@pytest.mark.skipif(shutil.which("srun") is None or "SLURM_CONF" not in os.environ, reason="no Slurm is up here")
def test_srun_places_ranks_on_its_nodes(alone):
    found = run(["srun", "-N2", "-n2", "--mpi=none", sys.executable], "ddp")
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert found["places"] == [[0, 2, 0, 1, 0, 2], [1, 2, 0, 1, 1, 2]]
