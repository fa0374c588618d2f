"""On a rank of the AxoNN tests: the open group, the strategies made on it, data and small models."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.nn.functional  # before a group is opened: it keeps the one it finds for good, as defaults
from torch import nn

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank import group, world
from ddl_magics.strategies import spec as specs
from ddl_magics.strategies.base import Training
from tests.strategies.models import samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.strategies.base import Strategy

warnings.simplefilter("error")
torch.set_num_threads(1)
here = world.from_environment("cpu")
group.open_group(here)
strategies: dict[str, Strategy] = {}


def prepare(text: str, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Prepare under a strategy that is kept for its spec, as a session keeps it."""
    if text not in strategies:
        strategies[text] = specs.load(specs.parse(text), here)
    return strategies[text].prepare(module, optimizer, Training())


def close() -> None:
    for strategy in strategies.values():
        strategy.close()
    strategies.clear()


def batch(number: int = 0) -> dict[str, torch.Tensor]:
    """A global batch for the MLP, the same on every rank."""
    picked = samples("mlp", 8 * (number + 1))[-8:]
    return {key: torch.stack([sample[key] for sample in picked]) for key in picked[0]}


def mine(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.chunk(here.world_size)[here.rank] for key, value in whole.items()}


def furthest(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((got[name] - value).abs().max()) for name, value in expected.items())


def said(action: Callable[[], Any]) -> str:
    """The one line that a user reads; empty where nothing was refused."""
    try:
        action()
    except UsageOnRankError as error:
        return str(error)
    return ""


class Tied(nn.Module):
    """A language model's parts without importing one: tied embeddings, a norm, layers with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.mix, self.norm = nn.Linear(16, 16, bias=False), nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.down(self.up(hidden).relu()) + self.mix(hidden))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Partly(nn.Module):
    """A model one of whose parameters only some batches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.seldom, self.never = nn.Embedding(4, 8), nn.Embedding(4, 8)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        hidden = self.body(x)
        return self.head(hidden + self.seldom.weight.sum(0) if extra else hidden).mean()
