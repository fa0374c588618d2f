"""The context in a plain program under torchrun, srun or mpiexec, or alone: what `ddl_magics.init` does.

Needs torch and nothing of a notebook. Under `single` rank 0 goes on alone and the others leave the program with
status 0, since they have nothing to do. Sentences for the user go to rank 0's stderr.
"""

from __future__ import annotations

import atexit
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddl_magics.protocol import CellRequest, World
from ddl_magics.rank import world as place_among
from ddl_magics.rank.context import Context
from ddl_magics.rank.group import TIMEOUT
from ddl_magics.strategies import spec

if TYPE_CHECKING:
    from torch.distributed import Store


def init(
    strategy: str = "ddp",
    *,
    precision: str = "32",
    checkpoint_activations: bool = False,
    seed: int | None = None,
    device: str = "auto",
    timeout: float = TIMEOUT.total_seconds(),
) -> Context:
    """Join the ranks that the launcher started and give the context under a strategy.

    Parameters
    ----------
    strategy
        One spec, such as `zero:3`.
    precision
        `32`, `bf16-mixed` or `bf16-true`.
    checkpoint_activations
        What `prepare` does with activations: keep only the inputs of blocks, and compute the rest again.
    seed
        Of Python, NumPy, torch, weights and the order of the data; None: as in a cell.
    device
        `auto`, `cpu` or `cuda`.
    timeout
        Seconds that a collective waits before it fails.

    Raises
    ------
    DDLError
        The strategy cannot run on this world, or the ranks did not find one another.
    """
    world = place_among.from_environment(device)
    checked = spec.check(spec.parse(strategy), world.world_size, world.local_world_size)
    if checked.name == "single":
        if world.rank != 0:
            raise SystemExit(0)
        world = World(0, 1, 0, 1, device=world.device)
    store = None
    if not dist.is_initialized():
        store = place_among.meet(world)
        world = place_among.place(world, store, device)
    place_among.open_group(world, store, timeout=timedelta(seconds=timeout))
    context = Context(world, say=_say if world.rank == 0 else None)
    request = CellRequest(
        code="",
        cell=0,
        run="program",
        name="program",
        strategy=checked.text,
        precision=precision,
        checkpoint_activations=checkpoint_activations,
        seed=seed,
    )
    context.recorder.start_run(request.run)
    context.begin_cell(request)
    atexit.register(_leave, context, store)
    return context


FAREWELL = 30.0
"""Seconds that rank 0 stays at the end for ranks that still need its store."""


def _leave(context: Context, store: Store | None) -> None:
    """Close the context; rank 0, whose process serves the store, goes last."""
    context.close()  # first of all: it frees ranks that wait for this one in a collective
    if store is None:
        return
    gone = store.add("ddl/gone", 1)
    deadline = time.monotonic() + FAREWELL
    while context.world.rank == 0 and gone < context.world.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
        gone = store.add("ddl/gone", 0)


def _say(text: str) -> None:
    print(f"ddl: {text}", file=sys.stderr)  # noqa: T201 - a program's own stderr
