"""`ddp`: a whole model on every rank, gradients averaged while the backward runs.

PyTorch's DistributedDataParallel (Li et al. 2020, arXiv:2006.15704). Option `find_unused_parameters=true` is DDP's
own, for models some of whose parameters take no part in a step; without it DDP raises at the next forward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from ddl_magics.strategies.base import Prepared, Strategy, Training
from ddl_magics.strategies.spec import StrategySpec, known_options, no_argument

if TYPE_CHECKING:
    import torch

UNUSED = "find_unused_parameters"


class DDP(Strategy):
    """Every rank holds everything: all shares are 1."""

    name: ClassVar[str] = "ddp"

    @classmethod
    def parse(cls, argument: str, options: dict[str, str]) -> StrategySpec:
        no_argument(cls.name, argument)
        known_options(cls.name, options, {UNUSED: ("true", "false")})
        given = tuple(pair for pair in sorted(options.items()) if pair != (UNUSED, "false"))
        return StrategySpec(cls.name, options=given)

    def model_init(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, training: Training) -> Prepared:
        from ddl_magics.strategies.common import claim
        from ddl_magics.strategies.ddp_module import DDPPrepared

        find_unused = self.spec.option(UNUSED) == "true"
        return claim(DDPPrepared(self, model, optimizer, training, find_unused=find_unused))
