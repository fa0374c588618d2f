"""On a rank of the recovery tests: models whose training breaks at a place of choice, and what a rank holds."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddl_magics.protocol import CellRequest
from ddl_magics.rank import group, pairs
from ddl_magics.rank.program import init
from tests.strategies.models import MLP, samples

BATCH = 8
torch.set_num_threads(1)
ddl = init("ddp", device="cpu")
culprit = ddl.world_size - 1
"""The rank that fails."""
_cells = itertools.count(1)


class BrokenError(Exception):
    """What the culprit raises."""


@dataclass
class Plan:
    """Where this rank fails next; nowhere without a place. Hooks look here: they must hold no model."""

    place: str = ""
    step: int = 0


_plan = Plan()


def begin(strategy: str, precision: str = "32") -> None:
    """Begin a cell as the notebook would."""
    number = next(_cells)
    run = f"run{number}"
    ddl.recorder.start_run(run)
    ddl.begin_cell(CellRequest(code="", cell=number, run=run, name=run, strategy=strategy, precision=precision, seed=1))


def batch(number: int) -> dict[str, torch.Tensor]:
    """Give this rank's part of the global batch of that number."""
    whole = samples("mlp", BATCH * (number + 1))[-BATCH:]
    mine = whole[ddl.rank :: ddl.world_size]
    return {key: torch.stack([sample[key] for sample in mine]) for key in mine[0]}


def _reach(place: str) -> None:
    if _plan.place == place:
        raise BrokenError(place)


def _watch_backward(_module: Any, _given: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda _: _reach("backward"))


class Trainee:
    """A model in training, with a schedule, whose steps can break."""

    def __init__(self, strategy: str, accumulate: int = 1, precision: str = "32") -> None:
        begin(strategy, precision)
        with ddl.model_init():
            model = MLP()
        groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 2e-2}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
        self.model, self.optimizer, _ = ddl.prepare(model, optimizer, schedule, accumulate=accumulate)
        self.accumulate = accumulate
        self.losses: dict[int, float] = {}
        middle = ddl.unwrap(self.model).body[2]
        middle.register_forward_pre_hook(lambda *_: _reach("forward"))
        middle.register_forward_hook(_watch_backward)
        self.optimizer.register_step_pre_hook(lambda *_: _reach("updating"))
        training = ddl.prepared_models()[-1]

        def after_update(*_: Any) -> None:
            if training.steps > _plan.step:
                _reach("updated")
            else:  # under ZeRO there is one update for each group of parameters
                _reach("half updated")

        self.optimizer.register_step_post_hook(after_update)

    def step(self, number: int, place: str = "", *, everywhere: bool = False) -> None:
        """One optimizer step on its own batches; `place`: where the culprit, or every rank, fails in the last one."""
        losses = []
        for micro in range(self.accumulate):
            _plan.place = place if micro == self.accumulate - 1 and (everywhere or ddl.rank == culprit) else ""
            _plan.step = number
            loss = self.model(**batch(number * self.accumulate + micro)).loss
            ddl.backward(loss, model=self.model)
            _reach("between")
            losses.append(float(loss.detach()))
            self.losses[number] = sum(losses) / len(losses)
            ddl.step(max_norm=1.0, model=self.model)

    def breaks(self, number: int, place: str) -> str:
        """Step `number`, in which the culprit fails and frees the others; what this rank raised."""
        try:
            self.step(number, place)
            self.step(number + 1)  # whoever needs nobody for the rest of a step waits in the next one
        except (BrokenError, RuntimeError) as error:
            pairs.shut()
            return type(error).__name__
        finally:
            _plan.place = ""
        return ""

    def forget_from(self, step: int) -> None:
        """Drop the losses of steps that were not made."""
        self.losses = {number: loss for number, loss in self.losses.items() if number < step}

    def all_losses(self) -> list[float]:
        """Means over the ranks, in the order of the steps."""
        return [float(ddl.all_reduce_mean(self.losses[number])) for number in sorted(self.losses)]


def recover() -> dict[str, Any]:
    """What happens between two cells when a rank has failed."""
    group.reopen_group()
    return ddl.recover()


def census(before: dict[str, int] | None = None) -> dict[str, int]:
    """What a rank holds; given time to become what it was `before`: the store's server sees later who has left it."""
    gc.collect()
    dist.barrier()
    deadline = time.monotonic() + 5
    while (now := _count()) != before and before is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return now


def _count() -> dict[str, int]:
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }
