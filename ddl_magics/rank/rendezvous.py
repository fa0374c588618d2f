"""How ranks find one another when no launcher names an address: rank 0 writes its store's into a file.

No port is fixed: rank 0 listens on a free one. The file lies where all ranks see it, in a private temporary folder
on one host and in the home directory (shared at nearly every site) across hosts; its name comes from what the
launcher gives all ranks of one job alone. `MASTER_ADDR` with `MASTER_PORT`, as torchrun sets them, come before any
file. Limits: across hosts without a shared home, and under MPICH outside a scheduler, those two must be set.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil

from ddl_magics.errors import StartError
from ddl_magics.protocol import JOB
from ddl_magics.rank.group import join_store, serve

if TYPE_CHECKING:
    from torch.distributed import Store

    from ddl_magics.protocol import World

PROXIES = ("hydra_pmi_proxy", "pmi_proxy", "prted", "prterun", "orted", "mpiexec", "mpirun", "slurmstepd")
"""Processes of launchers that are the parent of all ranks of a job on one host."""


def meet(world: World, timeout: float = 300.0) -> Store:
    """Store that all ranks of this world share; every rank calls it.

    Raises
    ------
    StartError
        The ranks did not find one another within `timeout` seconds.
    """
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        return _from_master_variables(world, timeout)
    one_host = world.local_world_size == world.world_size
    if world.world_size == 1:
        return serve()
    path = _folder(one_host) / f"{_job_key(world, one_host)}.json"
    if world.rank == 0:
        return _announce(path, world, one_host, timeout)
    return _follow(path, world, timeout)


def _from_master_variables(world: World, timeout: float) -> Store:
    import torch.distributed as dist

    rendezvous = dist.rendezvous("env://", world.rank, world.world_size, timeout=timedelta(seconds=timeout))
    return cast("Store", next(rendezvous)[0])


def _announce(path: Path, world: World, one_host: bool, timeout: float) -> Store:
    store = serve("127.0.0.1" if one_host else socket.gethostname())
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"host": store.host, "port": store.port}))
    draft.replace(path)
    try:
        deadline = time.monotonic() + timeout
        while store.add("ddl/met", 0) < world.world_size - 1:
            if time.monotonic() > deadline:
                raise _not_met(path, world, timeout)
            time.sleep(0.01)
    finally:
        path.unlink(missing_ok=True)
    return store


def _follow(path: Path, world: World, timeout: float) -> Store:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        address = _read(path)
        # A file that a crashed job of the same name left behind leads nowhere: look again until it is replaced.
        if address is not None and _listens(*address):
            store = join_store(*address)
            store.add("ddl/met", 1)
            return store
        time.sleep(0.02)
    raise _not_met(path, world, timeout)


def _read(path: Path) -> tuple[str, int] | None:
    list(path.parent.iterdir())  # a network file system looks again for a name it did not find only after this
    try:
        address = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return address["host"], address["port"]


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False


def _not_met(path: Path, world: World, timeout: float) -> StartError:
    return StartError(
        f"The {world.world_size} ranks did not find one another within {timeout:g} s by the file {path}",
        "Set MASTER_ADDR to the first host and MASTER_PORT to a free port for all of them.",
    )


def _folder(one_host: bool) -> Path:
    """Folder of ours alone: what lies in it is trusted with an address to connect to."""
    if not one_host:
        folder = Path.home() / ".cache" / "ddl_magics" / "rendezvous"
    else:
        folder = Path(tempfile.gettempdir()) / f"ddl_magics-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise StartError(f"{folder} belongs to somebody else or others may write to it", "Remove it, or set TMPDIR.")
    return folder


def _job_key(world: World, one_host: bool) -> str:
    """What all ranks of this job share, and no other job has, as a file name."""
    environ = os.environ
    if environ.get("PMIX_NAMESPACE"):  # Open MPI 4 and 5
        parts = [environ["PMIX_NAMESPACE"]]
    elif environ.get("SLURM_JOB_ID") and environ.get("SLURM_STEP_ID"):
        parts = [environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]]
    elif one_host:
        parts = [environ[JOB]] if environ.get(JOB) else _launcher_process()
    else:
        raise StartError(
            "Ranks on several hosts, and nothing in the environment that names their job",
            "Set MASTER_ADDR to the first host and MASTER_PORT to a free port for all of them.",
        )
    return hashlib.sha256("/".join([*parts, str(world.world_size)]).encode()).hexdigest()[:16]


def _launcher_process() -> list[str]:
    """Process id and start time of the launcher's process above this one, or of the parent where none is known."""
    ancestors = psutil.Process().parents()
    above = next((process for process in ancestors if process.name() in PROXIES), ancestors[0])
    return [str(above.pid), str(above.create_time())]
