"""Which MPI starts the ranks: the `mpiexec` that belongs to the library that mpi4py loads.

mpi4py works with one MPI library. A launcher of another MPI starts n processes that each believe to be alone, without
a word, so the two are compared before the start, and the world's size is verified by every rank after it.
Covers Open MPI 4 and 5, MPICH and its relatives on one machine; schedulers have their own launchers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ddl_magics.errors import StartError

HOSTILE_PREFIXES = (
    "SLURM_", "PMI_", "PMI2_", "PMIX_", "PMIRANK", "OMPI_COMM_", "OMPI_UNIVERSE_", "PRTE_LAUNCHED", "PRTE_BASE",
    "PALS_", "PBS_", "LSB_", "LSF_", "FLUX_", "ALPS_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDI_", "I_MPI_PM",
)  # fmt: skip
"""Variables by which an outer job speaks to *its* processes. An MPI started inside that job would take them for
orders of its own: wrong hosts, too few slots, or a wait for a daemon that is not there."""

_REMEDY = (
    "Install one with `pip install 'ddl-magics[mpi]'`, load your site's MPI module, or start without MPI by "
    "`%ddl start --launcher local`"
)

_PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


@dataclass(frozen=True)
class MPI:
    """One MPI installation."""

    vendor: str
    """`Open MPI` or `MPICH`; Intel, Cray and MVAPICH launch as MPICH does."""
    version: tuple[int, ...]
    mpiexec: Path

    def __str__(self) -> str:
        return f"{self.vendor} {'.'.join(map(str, self.version))}"


def vendor_of(text: str) -> tuple[str, tuple[int, ...]]:
    """Vendor and version in what a library or a launcher says of itself; vendor `` where it is neither."""
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        vendor = "Open MPI"
    elif re.search(r"MPICH|HYDRA|Intel\(R\) MPI|MVAPICH|CRAY", text, re.IGNORECASE):
        vendor = "MPICH"
    else:
        return "", ()
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return vendor, tuple(int(part) for part in found.groups() if part) if found else ()


@cache
def library(python: str) -> str:
    """What the MPI library that mpi4py loads in `python` says of itself; empty where mpi4py finds none."""
    probe = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False)
    return probe.stdout.strip()


@cache
def _launcher_says(mpiexec: Path, mtime: float) -> str:  # noqa: ARG001 - part of the cache's key
    says = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return says.stdout + says.stderr


def candidates() -> list[Path]:
    """Every `mpiexec` on PATH, in its order, then the one beside this Python: its environment may not be activated."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), str(Path(sys.executable).parent)]
    found = (shutil.which("mpiexec", path=folder) for folder in folders if folder)
    return list(dict.fromkeys(Path(path) for path in found if path))


def find() -> MPI:
    """The `mpiexec` that matches mpi4py's library. Raises StartError, with the remedy, where there is none."""
    launchers = candidates()
    if not launchers:
        msg = "no mpiexec was found on PATH or beside this Python"
        raise StartError(msg, _REMEDY)
    lib = library(sys.executable)
    vendor, version = vendor_of(lib)
    if not lib:
        msg = f"mpi4py finds no MPI library, though there is {launchers[0]}"
        raise StartError(msg, _REMEDY)
    seen = []
    for path in launchers:
        its_vendor, its_version = vendor_of(_launcher_says(path, path.stat().st_mtime))
        if its_vendor == vendor or not vendor:
            return MPI(its_vendor or vendor, its_version or version, path)
        seen.append(f"{path} is {its_vendor or 'of an unknown MPI'}")
    msg = f"mpi4py uses {vendor} {'.'.join(map(str, version))}, but {'; '.join(seen)}: ranks would not see one another"
    raise StartError(msg, _REMEDY)


def environment(mpi: MPI) -> dict[str, str]:
    """What this MPI needs to start any number of ranks on this machine, also as root in a container.

    Binding is off, because ranks outnumber cores on a laptop, and a rank's threads are limited by `OMP_NUM_THREADS`.
    Variables that the user has set are left alone.
    """
    home = {} if "HOME" in os.environ else {"HOME": str(Path.home())}  # Open MPI will not start without one
    if mpi.vendor != "Open MPI":
        return home
    wanted = home | {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }
    if mpi.version[:1] >= (5,):
        wanted = {name: value for name, value in wanted.items() if not name.startswith("OMPI_MCA")}
    if os.geteuid() == 0:
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def hostile_variables() -> list[str]:
    """Variables of this process's environment that must not reach an MPI started on this machine."""
    return sorted(name for name in os.environ if name.startswith(HOSTILE_PREFIXES))
