"""What a user may say of a cluster, checked and with its defaults filled in."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass, field
from typing import Any

from ddl_magics.cluster import mpi
from ddl_magics.errors import UsageError, nearest

LAUNCHERS = ("auto", "mpi", "local")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class ClusterOptions:
    """Options of `%ddl start`; None where the user said nothing."""

    n: int | None = None
    nnodes: int | None = None
    nproc_per_node: int | None = None
    launcher: str = "auto"
    device: str = "auto"
    strategy: str | None = None
    timeout: float = 60.0
    """Seconds until all ranks must be connected."""
    env: tuple[str, ...] = field(default=())
    keep: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for values that cannot be."""
        if self.launcher not in LAUNCHERS:
            msg = f"there is no launcher {self.launcher!r}"
            raise UsageError(msg, nearest(self.launcher, list(LAUNCHERS)))
        if self.device not in DEVICES:
            msg = f"there is no device {self.device!r}"
            raise UsageError(msg, nearest(self.device, list(DEVICES)))
        for flag, value in (("-n", self.n), ("--nnodes", self.nnodes), ("--nproc-per-node", self.nproc_per_node)):
            if value is not None and value < 1:
                msg = f"{flag} {value} is not a number of {'nodes' if flag == '--nnodes' else 'ranks'}"
                raise UsageError(msg, "It must be 1 or more.")
        if self.timeout <= 0:
            msg = f"--timeout {self.timeout:g} is not a time"
            raise UsageError(msg, "It is in seconds and must be above 0.")
        for pair in self.env:
            if "=" not in pair or pair.startswith("="):
                msg = f"--env {pair} is not of the form NAME=VALUE"
                raise UsageError(msg, "For example --env HF_HUB_OFFLINE=1.")
        if self.nnodes not in (None, 1):
            msg = f"--nnodes {self.nnodes}: ranks are started on this machine only"
            raise UsageError(msg, "Leave --nnodes out or give 1.")
        if self.n and self.nproc_per_node and self.n != self.nproc_per_node * (self.nnodes or 1):
            msg = f"-n {self.n} is not --nnodes {self.nnodes or 1} x --nproc-per-node {self.nproc_per_node}"
            raise UsageError(msg, "Give one of them, or make them agree.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the cluster's card."""
        return asdict(self)

    def world_size(self) -> int:
        """The number of ranks: as said, else the GPUs of this machine, else 2."""
        return self.n or self.nproc_per_node or (gpus_here() if self.device != "cpu" else 0) or 2

    def uses_mpi(self) -> bool:
        """Whether ranks become one MPI job: as said, else wherever there is an `mpiexec`."""
        return self.launcher == "mpi" or (self.launcher == "auto" and bool(mpi.candidates()))

    def environment(self, world_size: int) -> dict[str, str]:
        """Environment of the ranks: the user's own words, and threads from the cores that one rank may use."""
        env = dict(pair.split("=", 1) for pair in self.env)
        if "OMP_NUM_THREADS" not in os.environ:
            env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // world_size)))
        return env


def gpus_here() -> int:
    """Count the CUDA devices that ranks of this machine may use, without importing torch or touching CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"])
    if not shutil.which("nvidia-smi") and not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110
        return 0
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # a driver without a device, or the other way round: no GPU that could be used
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
