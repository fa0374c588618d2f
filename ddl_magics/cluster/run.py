"""`ddl-magics run`: a script on many ranks, by whatever starts them here.

In an allocation that is its `srun`; else the `mpiexec` that `%ddl start` would take; else plain processes of this
machine. What the script does not say to `ddl_magics.init` itself (strategy, precision, ...) reaches it by variables.
Limits: several nodes need an allocation of Slurm; the script reads nothing from the terminal.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddl_magics import lease
from ddl_magics.cluster import mpi
from ddl_magics.cluster.job import Job
from ddl_magics.cluster.options import ClusterOptions, gpus_here
from ddl_magics.errors import StartError, UsageError, nearest
from ddl_magics.protocol import JOB, PROGRAM_VARIABLES
from ddl_magics.strategies import spec as specs

if TYPE_CHECKING:
    from collections.abc import Mapping

LAUNCHERS = ("auto", "srun", "mpi", "local")
OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Variables of another job's rank, which this job's ranks must not take for their own."""


@dataclass(frozen=True)
class Wanted:
    """What was typed."""

    script: str
    arguments: tuple[str, ...] = ()
    n: int | None = None
    nnodes: int | None = None
    nproc_per_node: int | None = None
    launcher: str = "auto"
    env: tuple[str, ...] = ()
    program: Mapping[str, Any] = field(default_factory=dict)
    """By the names of `protocol.PROGRAM_VARIABLES`, None where nothing was said."""


@dataclass(frozen=True)
class Launch:
    """One way to start the ranks: command lines with their environments, one that starts all or one a rank."""

    by: str
    """In the user's words."""
    commands: tuple[tuple[str, ...], ...]
    environments: tuple[Mapping[str, str], ...]

    @property
    def job(self) -> str:
        """By which every process of it, and of no other, is known."""
        return self.environments[0][JOB]


def run(wanted: Wanted) -> int:
    """Run a script to its end; returns its exit status.

    Raises
    ------
    DDLError
        Nothing was started: there is no such script, or its strategy cannot run on so many ranks.
    """
    launch = plan(wanted)
    print(f"ddl-magics: {launch.by}: {shlex.join(launch.commands[0])}", file=sys.stderr, flush=True)  # noqa: T201 - a terminal's
    return Job(launch.commands, launch.environments, launch.job).run()


def plan(wanted: Wanted, environ: Mapping[str, str] = os.environ) -> Launch:
    """How a script will be started, checked. Raises DDLError."""
    if not Path(wanted.script).is_file():
        raise UsageError(f"there is no script {wanted.script}")
    if wanted.launcher not in LAUNCHERS:
        raise UsageError(f"there is no launcher {wanted.launcher!r}", nearest(wanted.launcher, list(LAUNCHERS)))
    launcher = _launcher(wanted.launcher, environ)
    if (wanted.nnodes or 1) > 1 and launcher != "srun":
        raise UsageError(
            f"--nnodes {wanted.nnodes}: several nodes need an allocation with srun", "Get one by salloc or sbatch."
        )
    n, nodes = _size(wanted, launcher, environ)
    per_node = -(-n // nodes)
    options = ClusterOptions(n=n, env=wanted.env, device=wanted.program.get("device") or "auto")
    strategy = wanted.program.get("strategy")
    if strategy:
        specs.check(specs.parse(strategy), n, per_node)
    ours = {JOB: uuid.uuid4().hex} | options.environment(per_node) | _told(wanted.program)
    command = (sys.executable, wanted.script, *wanted.arguments)
    if launcher == "srun":
        return _by_srun(wanted, n, command, {**environ, **ours})
    owner = lease.owner_variable(lease.Process.of(os.getpid()))
    clean = {name: value for name, value in environ.items()
             if not name.startswith((*mpi.HOSTILE_PREFIXES, "TORCHELASTIC_")) and name not in OF_A_JOB}  # fmt: skip
    clean |= ours | owner
    if launcher == "local":
        return _by_hand(n, command, clean)
    found = mpi.find()
    return Launch(f"{n} ranks by {found}", ((str(found.mpiexec), "-n", str(n), *command),),
                  (clean | mpi.environment(found),))  # fmt: skip


def _launcher(wanted: str, environ: Mapping[str, str]) -> str:
    """What starts the ranks here."""
    if wanted == "srun" and not environ.get("SLURM_JOB_ID"):
        raise UsageError("--launcher srun: this is no allocation of Slurm", "Get one by salloc or sbatch.")
    if wanted != "auto":
        return wanted
    if environ.get("SLURM_JOB_ID") and shutil.which("srun"):
        return "srun"
    try:
        mpi.find()
    except StartError:  # none, or one that mpi4py does not know; plain processes need neither
        return "local"
    return "mpi"


def _size(wanted: Wanted, launcher: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Ranks and nodes: as said, else a rank for each GPU, else as the allocation was asked for, else 2."""
    nodes = wanted.nnodes or (int(environ.get("SLURM_JOB_NUM_NODES") or 1) if launcher == "srun" else 1)
    for flag, value in (("-n", wanted.n), ("--nnodes", nodes), ("--nproc-per-node", wanted.nproc_per_node)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value} is too few", "It must be 1 or more.")
    per_node = wanted.nproc_per_node
    if wanted.n and per_node and wanted.n != per_node * nodes:
        raise UsageError(
            f"-n {wanted.n} is not {nodes} nodes x --nproc-per-node {per_node}", "Give one of them, or make them agree."
        )
    gpus = gpus_here() if wanted.program.get("device") != "cpu" else 0
    asked = int(environ.get("SLURM_NTASKS") or 0) if launcher == "srun" else 0
    n = wanted.n or (per_node or gpus) * nodes or asked or max(2, nodes)
    return n, min(nodes, n)


def _told(program: Mapping[str, Any]) -> dict[str, str]:
    """Variables for what was said."""
    return {PROGRAM_VARIABLES[name]: str(int(value) if isinstance(value, bool) else value)
            for name, value in program.items() if value is not None and value is not False}  # fmt: skip


def _by_srun(wanted: Wanted, n: int, command: tuple[str, ...], environment: Mapping[str, str]) -> Launch:
    where = ["-N", str(wanted.nnodes)] if wanted.nnodes else []
    each = ["--ntasks-per-node", str(wanted.nproc_per_node)] if wanted.nproc_per_node else []
    # A step beside others of the job, that of a notebook among them; torch needs no MPI of Slurm's.
    ways = ["--mpi=none", "--overlap", "--kill-on-bad-exit=1"]
    return Launch(f"{n} ranks by srun", (("srun", *where, "-n", str(n), *each, *ways, *command),), (environment,))


def _by_hand(n: int, command: tuple[str, ...], environment: Mapping[str, str]) -> Launch:
    environments = []
    for rank in range(n):
        place = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n, "GROUP_RANK": 0}
        environments.append({**environment} | {name: str(value) for name, value in place.items()})
    return Launch(f"{n} ranks as plain processes", (command,) * n, tuple(environments))
