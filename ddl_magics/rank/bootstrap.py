"""Turns a connected engine into a rank: world, process group, context, telemetry. Called by the notebook at a start."""

from __future__ import annotations

import os
import platform
import socket
import sys
from typing import Any


def facts() -> dict[str, Any]:
    """Who this process is. `size` is 1 outside MPI; imports torch, if the engine's thread has not finished that."""
    import torch

    rank, size = 0, 1
    if "mpi4py.MPI" in sys.modules:
        world = sys.modules["mpi4py.MPI"].COMM_WORLD
        rank, size = world.rank, world.size
    return {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": torch.cuda.device_count() if os.environ.get("DDL_MAGICS_DEVICE") != "cpu" else 0,
    }
