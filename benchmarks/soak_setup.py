"""What the cells of the soak use on each rank: prepared models, data, and the losses that one process would have.

The lines after the mark are a cell; `MOMENTS`, a folder, stands in front of them.
"""
# ruff: noqa: F401, F821 - some names are for the cells after this one, some are there on every rank

# The cell:
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

everybody = list(range(world_size))
before = rank + 41
models, steps, reference = {}, {}, []


def happened() -> None:
    """Write down that it happens now."""
    Path(MOMENTS, str(rank)).write_text(repr(time.time()))


class Slow(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.ones(1)


class Broken(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        happened()
        raise OSError("no such sample")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.head(torch.tanh(self.body(x))), labels)}


generator = torch.Generator().manual_seed(7)
x, labels = torch.randn(16, 32, generator=generator), torch.randint(0, 4, (16,), generator=generator)


def prepare() -> None:
    """A model under the strategy of the cell."""
    with ddl.model_init():
        model = Net()
    steps[ddl.strategy] = 0
    models[ddl.strategy] = ddl.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def step_of(name: str) -> bool:
    """One step of a prepared model; whether the loss is what one process, never disturbed, has at that step."""
    model, _ = models[name]
    loss = model(x, labels)["loss"]
    ddl.backward(loss, model=model)
    ddl.step(model=model)
    value, expected = float(ddl.all_reduce_mean(loss.detach())), reference[steps[name]]
    steps[name] += 1
    return abs(value - expected) <= 1e-3 * expected


def told() -> str:
    """Steps by strategy, and whether the loss of the next one is right."""
    lines = [f"{name} {steps[name] + 1} {'right' if step_of(name) else 'a wrong loss'}" for name in models]
    own = [training.steps for training in ddl.prepared_models()]
    return ", ".join(lines) + ("" if own == list(steps.values()) else f", but really {own}")


torch.manual_seed(0)
alone = Net()
optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-4)
for _ in range(1000):
    loss = alone(x, labels)["loss"]
    reference.append(float(loss.detach()))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
