"""The variables that torchrun would set, put into this process's environment and taken out again.

Raw `torch.distributed`, Hugging Face, DeepSpeed and Lightning code reads its world from them.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddl_magics.protocol import World

OPEN_MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"


class Overlay:
    """Variables laid over the environment; `remove` puts back what stood there before."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)

    def remove(self) -> None:
        """Put back what stood there; a variable that was not there is deleted."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}


def variables(world: World, host: str | None = None, port: int | None = None) -> dict[str, str]:
    """What torchrun sets for a rank of this world, and what libraries need beside it on a CPU.

    `LOCAL_RANK` is what programs use as a device index, so on a GPU it is the index of this rank's device: a task
    that sees one GPU of its own says 0, whatever its place on the node. `host` and `port` None: they stand already.
    """
    result = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(local_rank(world)),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "GROUP_RANK": str(world.node_rank),
    }
    if OPEN_MPI_LOCAL_RANK in os.environ:
        # Open MPI may count the ranks of a node in another order, and DeepSpeed refuses two local ranks.
        result[OPEN_MPI_LOCAL_RANK] = result["LOCAL_RANK"]
    if host is not None and port is not None:
        result |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    if world.device == "cpu":
        # Without it Accelerate on a CPU, and with it Trainer, silently makes N worlds of one rank.
        result["ACCELERATE_USE_CPU"] = "true"
        result["DS_ACCELERATOR"] = "cpu"
    if world.nodes == 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo binds to the address of the host's name, which need not be reachable, or even exist, on a laptop.
        result["GLOO_SOCKET_IFNAME"] = loopback_interface()
    return result


def local_rank(world: World) -> int:
    """What `LOCAL_RANK` says: the index of this rank's GPU, or its place on the node where there is none."""
    return int(world.device.partition(":")[2] or 0) if world.device != "cpu" else world.local_rank


def loopback_interface() -> str:
    """Name of the interface with the address 127.0.0.1: `lo` on Linux, `lo0` on macOS."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return str(name)
    return "lo0" if sys.platform == "darwin" else "lo"
