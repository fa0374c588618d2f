"""How the processes of the ranks are started: ipyparallel launchers of ours, registered as `ddl` and `ddl-local`.

Both run `ddl_magics.rank.engine`, an ipyparallel engine that imports torch while it waits to be connected.
"""

from __future__ import annotations

import sys

from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher, MPIEngineSetLauncher

from ddl_magics.cluster import mpi

ENGINE = "ddl_magics.rank.engine"


class MPIRanksLauncher(MPIEngineSetLauncher):
    """Ranks as one MPI job on this machine.

    `-m mpi4py` makes a rank that ends with an error abort the job instead of waiting for ever in MPI_Finalize.
    """

    @property
    def program(self) -> list[str]:
        """The engine's command line."""
        return [sys.executable, "-m", "mpi4py", "-m", ENGINE, "--mpi"]

    def find_args(self) -> list[str]:
        """Build the command line of the job, shielded from the variables of an outer job."""
        shield = [part for name in mpi.hostile_variables() for part in ("-u", name)]
        command: list[str] = super().find_args()
        return ["env", *shield, *command] if shield else command


class LocalRankLauncher(LocalEngineLauncher):
    """One rank as a plain process."""


class LocalRanksLauncher(LocalEngineSetLauncher):
    """Ranks as plain processes of this machine, for where there is no MPI."""

    launcher_class = LocalRankLauncher

    def start(self, n: int) -> list[int]:
        """Start n ranks; they get their numbers in the order in which they connect."""
        self.engine_cmd = [sys.executable, "-m", ENGINE]
        self.delay = 0.0
        return super().start(n)  # type: ignore[no-any-return]
