"""Starts real ranks by mpiexec for a script of this folder, and reads what they found.

A script runs many checks in one set of ranks, since starting them is most of the time, and only measures: each rank
writes its findings as JSON, and the tests judge them. (An assertion that fails on one rank would leave the others
waiting.)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]

ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True)
class Findings:
    """What the ranks of one script found."""

    ranks: list[dict[str, Any]]
    """Findings of each rank, by the name of the check; the checks before a failure are there too."""
    output: str
    """What the ranks printed, on both streams."""
    returncode: int

    def of(self, check: str) -> list[Any]:
        """Each rank's finding of one check; fails with the ranks' output where one has none."""
        assert all(check in rank for rank in self.ranks), f"{check} was not reached:\n{self.output[-4000:]}"
        return [rank[check] for rank in self.ranks]


def start(script: str, size: int, folder: Path, *arguments: str, timeout: float = 100) -> Findings:
    """Run `script` of this folder on `size` ranks as `python script FOLDER ARGUMENTS...`."""
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert launcher, "no mpiexec: pip install 'ddl-magics[mpi]'"
    process = subprocess.Popen(
        [launcher, "-n", str(size), sys.executable, str(FOLDER / script), str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        ranks = psutil.Process(process.pid).children(recursive=True)  # each is a process group of its own
        for one in [process, *ranks]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        output, _ = process.communicate()
        output += f"\n[{script}: stopped after {timeout} s]"
    found = [_read(folder / f"rank{rank}.json") for rank in range(size)]
    return Findings(found, output, process.returncode)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


class Notes:
    """On a rank: collects its findings, and writes them after each check."""

    def __init__(self, folder: str, rank: int) -> None:
        self.path = Path(folder) / f"rank{rank}.json"
        self.findings: dict[str, Any] = {}

    def write(self, check: str, finding: Any) -> None:
        self.findings[check] = finding
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.findings))
        draft.replace(self.path)
