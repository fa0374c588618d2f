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


def open_store(everywhere: bool) -> tuple[str, int]:
    """Open the store of the process group, on rank 0; host and port for the other ranks."""
    from ddl_magics.rank import group

    return group.open_store(socket.gethostname() if everywhere else "127.0.0.1")


def join(wire: dict[str, Any], host: str, port: int) -> dict[str, Any]:
    """Join the process group and make this engine a rank; its device and backend."""
    import dataclasses

    import torch.distributed as dist

    from ddl_magics.protocol import World
    from ddl_magics.rank import device, group
    from ddl_magics.rank.cell import Runner
    from ddl_magics.rank.completion import page_in_output
    from ddl_magics.rank.context import Context
    from ddl_magics.rank.engine import cell_name, is_cell_file, this_kernel
    from ddl_magics.rank.rescue import Rescue
    from ddl_magics.rank.sampler import Sampler
    from ddl_magics.rank.whereabouts import Whereabouts

    world = World.from_wire(wire)
    wanted = os.environ.get("DDL_MAGICS_DEVICE", "auto")
    world = dataclasses.replace(world, device=device.choose(world.local_rank, world.local_world_size, wanted))
    group.join(world, host, port)
    context = Context(world)
    kernel = this_kernel()
    whereabouts = Whereabouts(is_cell_file, cell_name)
    rescue = Rescue(whereabouts)
    sampler = Sampler(context, lambda kind, content: kernel.publish(kind, content, parent={}), whereabouts, rescue)
    kernel.runner = Runner(kernel, context, sampler, rescue)
    page_in_output(kernel)
    kernel.requests |= {
        "state": sampler.state,
        "stack": sampler.stack,
        "release": rescue.release,
        "interrupt": rescue.interrupt,
        "made": group.made,
        "debug": kernel.runner.breakpoints.command,
        "hush": context.hush,
    }
    return {"device": world.device, "backend": dist.get_backend(), "groups": group.counts()}


def recover(occasion: str, regroup: bool, within: bool) -> dict[str, Any]:
    """Make the process group anew, and the models of this rank work over it; a collective of all ranks, between cells.

    `occasion` names the attempt, the same on all ranks. Without `regroup` the group is sound and stays, and only the
    models are brought to the beginning of a step. `within`: runs of a comparison are still to come.

    Returns what `Scope.recover` tells, with the `groups` and how many collectives each has had, and the number of
    `lost_groups` that nobody made again.
    """
    from ddl_magics.rank import collectives, group
    from ddl_magics.rank.engine import this_kernel
    from ddl_magics.strategies import zero_library

    runner = this_kernel().runner
    runner.forget_failure()
    if not within:
        runner.forget_comparison()
    before = collectives.number_of_groups()
    if regroup:
        group.reopen_group(occasion)
    runner.rescue.broken = False
    if "deepspeed" in sys.modules:  # a program's own use of it too, which no strategy of ours knows of
        zero_library.forget_old_world()
    told: dict[str, Any] = runner.context.recover()
    lost = max(0, before - collectives.number_of_groups())
    return told | {"groups": group.counts(), "lost_groups": lost}
