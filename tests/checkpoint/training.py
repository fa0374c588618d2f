"""On a rank: a training cell that is saved on its way and goes on elsewhere. The tests judge what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from ddl_magics.protocol import CellRequest
from ddl_magics.rank.program import init
from tests.strategies.models import MLP, MODELS, samples

if TYPE_CHECKING:
    from pathlib import Path

    from ddl_magics.rank.context import Context

BATCH = 4
SAMPLES = 24
"""Six batches in an epoch: ten steps end in the middle of the second."""
HALF, STEPS = 5, 10
EPOCHS = 2


class Dropped(MLP):
    """With dropout, whose random numbers are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(torch.nn.Dropout(0.2))


BUILD = {**MODELS, "dropout": Dropped}


class Cells:
    """Cells on this rank, one after the other; `ddl` None: of a program."""

    def __init__(self, ddl: Context | None = None) -> None:
        torch.set_num_threads(1)
        self.ddl: Any = init("ddp", device="cpu") if ddl is None else ddl
        self.count = 0

    def do(self, task: str, checkpoints: Path) -> dict[str, Any]:
        """Make the checkpoint `RANKS STRATEGY MODEL` for the task `STRATEGY MODEL`; load one for `STRATEGY<NAME`."""
        strategy, loads, name = task.partition("<")
        if loads:
            return self.resumed(strategy, name.split()[-1], checkpoints / name)
        strategy, model = task.split()
        return self.halfway(strategy, model, checkpoints / f"{self.ddl.world.world_size} {task}")

    def begin(self, strategy: str, seed: int) -> None:
        """Begin a cell as the notebook would."""
        self.count += 1
        run = f"run{self.count}"
        request = CellRequest(code="", cell=self.count, run=run, name=run, strategy=strategy, seed=seed)
        self.ddl.recorder.start_run(run)
        self.ddl.begin_cell(request)

    def build(self, name: str, accumulate: int = 1) -> tuple[Any, ...]:
        """A model with all that a checkpoint keeps."""
        with self.ddl.model_init():
            model = BUILD[name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7], gamma=0.5)
        data = samples("mlp" if name == "dropout" else name, SAMPLES)
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        return self.ddl.prepare(model, optimizer, schedule, loader, accumulate=accumulate)

    def train(self, model: Any, loader: Any, steps: int | None = None) -> list[float]:
        """Losses (mean over ranks) of so many optimizer steps, or to the end of all epochs."""
        losses = []
        for batch in self.ddl.track(loader, epochs=EPOCHS, steps=steps):
            loss = model(**batch).loss
            losses.append(float(self.ddl.all_reduce_mean(loss.detach())) if self.ddl.world_size > 1 else loss.item())
            self.ddl.backward(loss, model=model)
            self.ddl.step(max_norm=1.0, model=model)
        return losses

    def halfway(self, strategy: str, name: str, folder: Path) -> dict[str, Any]:
        """Half of the steps, a save, and the other half: what a load elsewhere must give again."""
        self.begin(strategy, seed=1)
        model, optimizer, _, loader = self.build(name)
        before = self.train(model, loader, HALF)
        self.ddl.save(folder, model, best=min(before))
        loader.bookmark.take_up(loader.bookmark.position())  # the loop goes on where it was left
        losses = self.train(model, loader, STEPS - HALF)
        rates = [group["lr"] for group in optimizer.param_groups]
        weights = self.ddl.full_state_dict(model)
        if self.ddl.rank == 0:
            torch.save({"before": before, "losses": losses, "rates": rates, "weights": weights}, f"{folder}.pt")
        self.ddl.end_cell()
        return {"losses": losses}  # which every rank tells, so that a rank that differs is seen

    def resumed(self, strategy: str, name: str, folder: Path) -> dict[str, Any]:
        """Load in another process, make the other half, and compare with what the first made."""
        self.begin(strategy, seed=2)
        model, optimizer, _, loader = self.build(name)
        loaded = self.ddl.load(folder, model)
        losses = self.train(model, loader, STEPS - HALF)
        wanted = torch.load(f"{folder}.pt", weights_only=True)
        weights = self.ddl.full_state_dict(model)
        points = [p.step for p in self.ddl.recorder.drain()["points"] if p.name == "loss"]
        self.ddl.end_cell()
        return {
            "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted["losses"], strict=True)),
            "weights": _difference(weights, wanted["weights"]),
            "rates": [group["lr"] for group in optimizer.param_groups] == wanted["rates"],
            "step": loaded.step,
            "best": loaded.extra["best"] == min(wanted["before"]),
            "points": points,
            "moved": abs(wanted["losses"][-1] - wanted["before"][0]),
        }


def _difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference of a weight, in units of the largest weight."""
    assert list(got) == list(wanted)
    largest = max(float(weight.abs().max()) for weight in wanted.values())
    return max(float((got[key].float() - weight.float()).abs().max()) for key, weight in wanted.items()) / largest
