"""`single`: plain PyTorch in one process, what every other strategy is compared with.

Rank 0 trains with the whole batch; the other ranks stand by. Takes no argument and no options.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from ddl_magics.strategies.base import Prepared, Strategy, Training
from ddl_magics.strategies.spec import StrategySpec, known_options, no_argument

if TYPE_CHECKING:
    import torch


class Single(Strategy):
    """One process holds everything: all shares are 1."""

    name: ClassVar[str] = "single"
    alone: ClassVar[bool] = True

    @classmethod
    def parse(cls, argument: str, options: dict[str, str]) -> StrategySpec:
        no_argument(cls.name, argument)
        known_options(cls.name, options, {})
        return StrategySpec(cls.name)

    @property
    def data_rank(self) -> int:
        return 0

    @property
    def data_size(self) -> int:
        return 1

    def model_init(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, training: Training) -> Prepared:
        from ddl_magics.strategies.common import ModulePrepared, claim

        return claim(ModulePrepared(self, model, optimizer, training))
