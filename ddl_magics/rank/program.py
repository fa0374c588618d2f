"""The context in a plain program under torchrun, srun or mpiexec, or alone: what `ddl_magics.init` does.

Needs torch and nothing of a notebook. Under `single` rank 0 goes on alone and the others leave the program with
status 0, since they have nothing to do. Sentences for the user go to rank 0's stderr.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddl_magics import lease
from ddl_magics.errors import UsageOnRankError
from ddl_magics.protocol import JOB, CellRequest, World
from ddl_magics.rank import uncaught
from ddl_magics.rank import world as place_among
from ddl_magics.rank.asked import asked
from ddl_magics.rank.context import Context
from ddl_magics.rank.group import TIMEOUT
from ddl_magics.strategies import spec

if TYPE_CHECKING:
    from torch.distributed import Store


class Program(Context):
    """The context of a plain program, which has no cells: it says itself where a part with other options begins.

    Parameters
    ----------
    world
        This rank's place; its process group is open.
    options
        What `init` was asked: `strategy`, `precision`, `checkpoint_activations`, `steps`.
    """

    def __init__(self, world: World, options: dict[str, Any]) -> None:
        super().__init__(world, say=_say if world.rank == 0 else None)
        self._options = options
        self._parts = 0

    def begin(
        self,
        strategy: str | None = None,
        *,
        precision: str | None = None,
        checkpoint_activations: bool | None = None,
        steps: int | None = None,
        seed: int | None = None,
    ) -> None:
        """Go on as a new `%%ddl` cell with these options does; every rank calls it.

        What is None is as `init` was asked, but for the seed: without one the random state goes on, and `model_init`
        and the order of the data use 0, as in a cell.

        Raises
        ------
        DDLError
            The strategy cannot run on this world, or is for one process and there are several.
        """
        if spec.parse(strategy or self._options["strategy"]).name == "single" and self.world.world_size > 1:
            raise UsageOnRankError(
                f"begin under single, in a program of {self.world.world_size} ranks",
                'Begin the program under it: ddl_magics.init("single").',
            )
        given = {
            "strategy": strategy,
            "precision": precision,
            "checkpoint_activations": checkpoint_activations,
            "steps": steps,
        }
        wanted = self._options | {name: value for name, value in given.items() if value is not None}
        self._parts += 1
        if self._parts > 1:
            self.end_cell()
        request = CellRequest(code="", cell=self._parts, run="program", name="program", seed=seed, **wanted)
        self.recorder.start_run(request.run)
        self.begin_cell(request)


def init(
    strategy: str | None = None,
    *,
    precision: str | None = None,
    checkpoint_activations: bool | None = None,
    steps: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    timeout: float = TIMEOUT.total_seconds(),
) -> Program:
    """Join the ranks that the launcher started and give the context under a strategy.

    What is None is taken from `ddl-magics run`, which says it by variables (`protocol.PROGRAM_VARIABLES`), and else is
    as in a cell whose line is empty.

    Parameters
    ----------
    strategy
        One spec, such as `zero:3`; `ddp` by itself.
    precision
        `32`, `bf16-mixed` or `bf16-true`.
    checkpoint_activations
        What `prepare` does with activations: keep only the inputs of blocks, and compute the rest again.
    steps
        `track` ends its loop after so many optimizer steps.
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
    uncaught.install()
    lease.end_with_owner()
    if JOB in os.environ and isinstance(sys.stdout, io.TextIOWrapper):
        # Unbuffered, text and end of a line would be written by themselves, and mixed with those of other ranks.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    given = {
        "strategy": strategy,
        "precision": precision,
        "checkpoint_activations": checkpoint_activations,
        "steps": steps,
        "seed": seed,
        "device": device,
    }
    options, notes = asked(given)
    seed, device = options.pop("seed"), options.pop("device")
    world = place_among.from_environment(device)
    checked = spec.check(spec.parse(options["strategy"]), world.world_size, world.local_world_size)
    if checked.name == "single":
        if world.rank != 0:
            raise SystemExit(0)
        world = World(0, 1, 0, 1, device=world.device)
    store = None
    if not dist.is_initialized():
        store = place_among.meet(world)
        world = place_among.place(world, store, device)
    place_among.open_group(world, store, timeout=timedelta(seconds=timeout))
    context = Program(world, options | {"strategy": checked.text})
    context.begin(seed=seed)
    for note in notes:
        context.note(note)
    atexit.register(_leave, context, store)
    return context


FAREWELL = 30.0
"""Seconds that rank 0 stays at the end for ranks that still need its store."""
FAREWELL_AFTER_FAILURE = 1.0
"""The same after an error that nobody caught: the launcher ends the others once this process is gone."""


def _leave(context: Context, store: Store | None) -> None:
    """Close the context; rank 0, whose process serves the store, goes last."""
    context.close()  # first of all: it frees ranks that wait for this one in a collective
    if store is None:
        return
    gone = store.add("ddl/gone", 1)
    patience = FAREWELL_AFTER_FAILURE if getattr(sys, "last_value", None) is not None else FAREWELL
    deadline = time.monotonic() + patience
    while context.world.rank == 0 and gone < context.world.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
        gone = store.add("ddl/gone", 0)


def _say(text: str) -> None:
    print(f"ddl: {text}", file=sys.stderr)  # noqa: T201 - a program's own stderr
