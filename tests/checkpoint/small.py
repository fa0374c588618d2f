"""The smallest thing that has all that a checkpoint keeps, for tests that save often."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

SAMPLES = torch.randn(12, 3, generator=torch.Generator().manual_seed(3))


class Small(torch.nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 1)
        self.register_buffer("made_anew", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def prepare(ddl: Any, seed: int = 0, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, schedule and loader: three batches of four samples in an epoch."""
    with ddl.model_init(seed):
        model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return ddl.prepare(model, optimizer, schedule, DataLoader(SAMPLES, batch_size=4, shuffle=True), **options)


def train(ddl: Any, model: Any, loader: Any, **options: Any) -> list[float]:
    """Losses of a loop, see `ddl.track` for the options."""
    losses = []
    for x in ddl.track(loader, **options):
        loss = model(x).pow(2).mean()
        ddl.backward(loss, model=model)
        ddl.step(model=model)
        losses.append(loss.item())
    return losses
