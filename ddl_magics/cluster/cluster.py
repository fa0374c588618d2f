"""One cluster: a controller and ranks, brought up, verified, and taken down again without a trace."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipyparallel as ipp
from ipyparallel.cluster.launcher import LocalControllerLauncher

from ddl_magics import errors, lease
from ddl_magics.cluster import diagnosis, mpi
from ddl_magics.cluster.folder import Card, ClusterFolder, remove_leftovers
from ddl_magics.cluster.ipp import RankClient
from ddl_magics.cluster.launchers import LocalRanksLauncher, MPIRanksLauncher
from ddl_magics.cluster.loop import LoopThread
from ddl_magics.cluster.processes import end, family, terminate
from ddl_magics.errors import DDLError, StartError
from ddl_magics.lease import Process

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ddl_magics.cluster.options import ClusterOptions

BEAT_MS = 200
"""Period of the controller's heartbeat. Engines are announced at their second beat: half of a default start is
this wait."""

LOST_AFTER_S = 60
"""Seconds without a heartbeat until a rank counts as lost. Nannies tell of a death at once; this is for a lost host."""

STOP_S = 5.0
"""Seconds that processes have to end in order before they are killed."""

BROKEN_S = 1.0
"""The same where launcher or controller are gone: nobody hands the order on, or nannies report to nobody."""

Progress = Callable[[str], None]


class ControllerLauncher(LocalControllerLauncher):
    """ipyparallel's controller under our lease."""

    def find_args(self) -> list[str]:
        """Build its command line."""
        self.controller_cmd = [sys.executable, "-m", "ddl_magics.cluster.controller"]
        return super().find_args()  # type: ignore[no-any-return]


class Cluster:
    """The processes of a cluster and a client connected to them.

    `start` returns when every rank has answered and the world's size is right; on any failure nothing is left.
    """

    client: RankClient

    def __init__(self, options: ClusterOptions) -> None:
        self.options = options
        self.n = options.world_size()
        self.mpi = mpi.find() if options.uses_mpi() else None
        self.owner = Process.of(os.getpid())
        self.processes: set[Process] = set()
        """The launcher, the ranks and what they started."""
        self.controller: set[Process] = set()
        """The controller and what it started."""
        self.facts: list[dict[str, Any]] = []
        """By rank: host, pid, engine, local rank, and what else `rank.bootstrap.facts` tells."""

    @property
    def cluster_id(self) -> str:
        """Names the folder."""
        return self.folder.cluster_id

    def start(self, tell: Progress) -> None:
        """Start all processes and connect. Raises StartError with the launcher's words; leaves nothing behind then."""
        remove_leftovers()
        self.folder = ClusterFolder.new()
        self.loop = LoopThread("ddl cluster")
        self.ipp = self._ipp_cluster()
        self.started = time.time()
        try:
            self._launch(tell)
            self._connect(tell)
            self._verify()
        except BaseException as error:
            printed = self.printed()
            self.stop()
            if isinstance(error, (DDLError, KeyboardInterrupt)):
                raise
            cause, remedy = diagnosis.explain(f"{printed}\n{error}")
            words = diagnosis.last_lines(printed) or str(error)
            msg = f"{words}\n{cause} ({self.n} ranks by {self.mpi or 'the local launcher'})"
            raise StartError(msg, remedy) from error

    def _ipp_cluster(self) -> ipp.Cluster:
        log = logging.getLogger(f"ddl_magics.{self.folder.cluster_id}")
        log.propagate = False
        log.setLevel(logging.CRITICAL)  # the launcher's words are read from its own file
        ours = self.options.environment(self.n)
        if not self.options.keep:
            ours |= lease.owner_variable(self.owner)
        ours["DDL_MAGICS_DEVICE"] = self.options.device
        engines = MPIRanksLauncher if self.mpi else LocalRanksLauncher
        cluster = ipp.Cluster(
            parent=None,
            log=log,
            load_profile=False,
            shutdown_atexit=False,
            profile_dir=str(self.folder.path),
            cluster_id=self.folder.cluster_id,
            cluster_file="",  # our card tells more
            controller=ControllerLauncher,
            engines=engines,
            delay=0,
            # Ranks wait for the connection file themselves: they start beside the controller, and no key is in
            # their environment.
            send_engines_connection_env=False,
        )
        misses = LOST_AFTER_S * 1000 // BEAT_MS
        controller_args = [
            "--log-level=ERROR",  # it would log each message type that it does not know, ours among them
            f"--HeartMonitor.period={BEAT_MS}",
            f"--HeartMonitor.max_heartmonitor_misses={misses}",
            "--nodb",
        ]
        engine_args = [
            f"--IPEngine.wait_for_url_file={self.options.timeout}",
            f"--IPEngine.timeout={self.options.timeout}",
            f"--IPEngine.max_heartbeat_misses={misses}",
            "--HistoryManager.enabled=False",
            "--log-level=WARN",
        ]
        cluster.config.merge(
            {
                "ControllerLauncher": {"controller_args": controller_args, "environment": ours},
                engines.__name__: {"environment": ours | (mpi.environment(self.mpi) if self.mpi else {})},
                "EngineLauncher": {"engine_args": engine_args},
                "MPILauncher": {"mpi_cmd": [str(self.mpi.mpiexec)] if self.mpi else ["mpiexec"]},
            }
        )
        return cluster

    def _launch(self, tell: Progress) -> None:
        tell(f"starting {self.n} ranks by {self.mpi or 'the local launcher'} ...")
        self.loop.run(self.ipp.start_controller())
        self.loop.run(self.ipp.start_engines(self.n))

    def _connect(self, tell: Progress) -> None:
        deadline = time.monotonic() + self.options.timeout
        while not self.folder.client_file.exists():
            self._check_launch(deadline)
            time.sleep(0.05)
        self.client = RankClient(self.folder.client_file)
        seen = -1
        while (up := len(self.client.engines())) < self.n:
            self._check_launch(deadline, up)
            if up != seen:
                tell(f"{up} of {self.n} ranks connected ...")
                seen = up
            time.sleep(0.02)
        tell(f"{self.n} ranks connected, importing torch ...")

    def _check_launch(self, deadline: float, up: int = 0) -> None:
        """Raise when the launcher or the controller has ended, or time is up."""
        for launcher, name in ((self.ipp.controller, "the controller"), (self.ipp.engine_set, "the launcher")):
            if launcher.state == "after":
                msg = f"{name} ended with exit code {launcher.stop_data.get('exit_code')}"
                raise RuntimeError(msg)
        if time.monotonic() > deadline:
            msg = f"{up} of {self.n} ranks connected within {self.options.timeout:g} s"
            raise TimeoutError(msg)

    def _verify(self) -> None:
        """Every rank tells who it is: one world of n, each rank once."""
        engines = self.client.engines()
        told = self.wait(self.client.call("ddl_magics.rank.bootstrap:facts", dict.fromkeys(engines, ())))
        sizes = {fact["size"] for fact in told.values()}
        if self.mpi and sizes != {self.n}:
            msg = f"the ranks see worlds of {sorted(sizes)} instead of {self.n}: {self.mpi.mpiexec} is not mpi4py's MPI"
            raise StartError(msg, "Install mpi4py for the MPI that is on PATH, or `pip install 'ddl-magics[mpi]'`")
        ranks = {engine: fact["rank"] if self.mpi else engines.index(engine) for engine, fact in told.items()}
        if sorted(ranks.values()) != list(range(self.n)):
            msg = f"the ranks call themselves {sorted(ranks.values())} instead of 0 to {self.n - 1}"
            raise StartError(msg, "Start again; if it stays, start with --launcher local")
        self.client.engine_of = {rank: engine for engine, rank in ranks.items()}
        self.facts = [told[engine] | {"rank": rank, "engine": engine}
                      for engine, rank in sorted(ranks.items(), key=lambda pair: pair[1])]  # fmt: skip
        hosts = list(dict.fromkeys(fact["host"] for fact in self.facts))
        for fact in self.facts:
            same = [f["rank"] for f in self.facts if f["host"] == fact["host"]]
            fact |= {"local_rank": same.index(fact["rank"]), "local_size": len(same),
                     "node_rank": hosts.index(fact["host"]), "nodes": len(hosts)}  # fmt: skip
        self._note_processes()

    def _note_processes(self) -> None:
        """Remember every process of ours, by number and start time: what `stop` must see gone."""
        for launcher in self._rank_launchers():
            self.processes |= family(launcher.process.pid)
        for fact in self.facts:
            self.processes |= family(fact["pid"])
        if self.ipp.controller:
            self.controller |= family(self.ipp.controller.process.pid)

    def _rank_launchers(self) -> list[Any]:
        """Of one MPI job, or of each rank by itself."""
        engine_set = self.ipp.engine_set
        parts = [engine_set, *getattr(engine_set, "launchers", {}).values()]
        return [launcher for launcher in parts if getattr(launcher, "process", None)]

    def write_card(self) -> None:
        """Let terminals find this cluster."""
        keys = ("rank", "host", "pid", "device", "engine")
        self.folder.write_card(
            Card(
                cluster_id=self.cluster_id,
                owner=self.owner,
                started=self.started,
                options=self.options.to_dict(),
                processes=sorted(self.processes, key=lambda process: process.pid),
                controller=sorted(self.controller, key=lambda process: process.pid),
                ranks=[{key: fact.get(key) for key in keys} for fact in self.facts],
            )
        )

    def wait(
        self, futures: dict[int, Future[Any]], timeout: float | None = None, check: Callable[[], None] | None = None
    ) -> dict[int, Any]:
        """Results by rank. Raises what a rank raised, what `check` raises meanwhile, or TimeoutError."""
        patience = timeout or self.options.timeout
        deadline = time.monotonic() + patience
        while waiting := [rank for rank, future in futures.items() if not future.done()]:
            if time.monotonic() > deadline:
                msg = f"no answer from ranks {waiting} within {patience:g} s"
                raise TimeoutError(msg)
            if any(future.done() and future.exception() for future in futures.values()):
                break  # the others may wait in vain for the one that failed
            if check is not None:
                check()
            time.sleep(0.002)
        for rank, future in futures.items():
            error = future.exception() if future.done() else None
            if isinstance(error, ipp.RemoteError) and (kind := errors.by_name(error.ename)):
                raise kind(f"rank {rank}: {error.evalue}") from None
            if error is not None:
                raise error
        return {rank: future.result() for rank, future in futures.items()}

    def ended(self) -> bool:
        """Whether the controller or the launcher of the ranks has ended, by itself or by somebody else's hand."""
        return any(part is None or part.state == "after" for part in (self.ipp.controller, self.ipp.engine_set))

    def printed(self) -> str:
        """What launcher and ranks printed by themselves; ipyparallel removes the file at their end, but remembers."""
        engine_set = self.ipp.engine_set
        if engine_set is None:
            return ""
        file = Path(engine_set.output_file)
        return file.read_text(errors="replace") if file.is_file() else engine_set.get_output()

    def stop(self) -> list[int]:
        """End every process of the cluster; return the numbers of those that had to be killed. Never by name.

        The controller goes last: each rank's nanny tells it that the rank has ended, and would wait for it in vain.
        """
        if not hasattr(self, "ipp"):
            return []
        patience = BROKEN_S if self.ended() else STOP_S
        self._note_processes()
        if hasattr(self, "client"):
            self.client.on_leave = None
            self.client.close(linger=0)
        for launcher in self._rank_launchers():
            terminate(Process(launcher.process.pid, launcher.process.create_time()))
        killed = end(self.processes, patience)
        if self.ipp.controller:
            terminate(Process(self.ipp.controller.process.pid, self.ipp.controller.process.create_time()))
        killed += end(self.controller, STOP_S)
        self.loop.close()
        self.folder.remove()
        return killed
