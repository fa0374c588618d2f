"""`zero`: DeepSpeed's ZeRO, which shards what DDP repeats on every rank.

Stage 1 shards the optimizer's state, stage 2 the gradients too, stage 3 the parameters too (Rajbhandari et al. 2020,
arXiv:1910.02054). Options: `offload=cpu` keeps the optimizer's state and its step on the host, `offload_param=cpu`
(stage 3) the parameter shards, `config=FILE` merges a raw DeepSpeed configuration.

Limits: each rank builds the whole model on its host once, so that its weights are those of one process; fp16 and
DeepSpeed's own optimizers and schedulers are not offered. Parameters are sharded over all ranks. After `close` a
stage 3 model is still sharded: only `zero:3` can prepare it again.

What a rank holds differs from `shares` in this: stage 1 has all gradients only until the end of the backward at a
boundary, then its share; a gradient at the border of two shards is whole on both sides in stages 1 and 2; stage 3
keeps small parameters whole, at most 2 % of a shard; with `offload=cpu` DeepSpeed keeps a second copy of the shard
and of its gradients on the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from ddl_magics.errors import SpecError
from ddl_magics.strategies import zero_config
from ddl_magics.strategies.base import Prepared, Strategy, Training
from ddl_magics.strategies.spec import StrategySpec, known_options, require

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ddl_magics.protocol import World
    from ddl_magics.strategies.base import Whole

STAGES = ("1", "2", "3")
DEFAULT_STAGE = "2"


class Zero(Strategy):
    """ZeRO stage 1, 2 or 3 over all ranks."""

    name: ClassVar[str] = "zero"

    def __init__(self, spec: StrategySpec, world: World) -> None:
        super().__init__(spec, world)
        from ddl_magics.strategies import zero_library

        zero_library.join(self)
        if self.stage == 3:
            self.not_compiled = "DeepSpeed gathers and frees each layer's parameters in Python"

    @classmethod
    def parse(cls, argument: str, options: dict[str, str]) -> StrategySpec:
        stage = argument or DEFAULT_STAGE
        if stage not in STAGES:
            message = f"ZeRO has no stage {stage!r}"
            raise SpecError(message, f"Valid: {', '.join(f'zero:{valid}' for valid in STAGES)}.")
        known_options(cls.name, options, {"offload": ("cpu",), "offload_param": ("cpu",), "config": ()})
        if "offload_param" in options and stage != "3":
            message = f"zero:{stage} keeps parameters whole, so that offload_param has nothing to move"
            raise SpecError(message, "Write zero:3,offload_param=cpu.")
        return StrategySpec(cls.name, stage, tuple(sorted(options.items())))

    @classmethod
    def check(cls, spec: StrategySpec, world_size: int, local_world_size: int) -> StrategySpec:
        require(cls.name, "deepspeed", "deepspeed")
        path = spec.option("config")
        if path is not None:
            zero_config.check(zero_config.read(path), path, int(spec.argument))
        return super().check(spec, world_size, local_world_size)

    @classmethod
    def shares(cls, spec: StrategySpec, world_size: int) -> dict[str, float]:
        """1/N of what the stage shards, all of the rest: figure 1 of the paper.

        For bf16 weights the optimizer's part includes the fp32 master copy, as in the paper's K = 12.
        """
        stage = int(spec.argument)
        first_sharded_at = {"parameters": 3, "gradients": 2, "optimizer": 1}
        return {kind: 1 / world_size if stage >= first else 1.0 for kind, first in first_sharded_at.items()}

    @property
    def stage(self) -> int:
        return int(self.spec.argument)

    def model_init(self) -> AbstractContextManager[None]:
        """Build the plain model, so that it draws what one process draws; `prepare` shards it.

        Not earlier: a program looks at shapes in between, as where weight decay is for matrices only.
        """
        return nullcontext()

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, training: Training) -> Prepared:
        from ddl_magics.strategies.common import claim
        from ddl_magics.strategies.zero_module import ZeroPrepared

        return claim(ZeroPrepared(self, model, optimizer, training))

    def materialise(self, module: torch.nn.Module, read: Callable[[str], Whole]) -> None:
        if self.stage < 3:
            super().materialise(module, read)
            return
        from ddl_magics.strategies import zero_read

        zero_read.materialise(module, read, offload=self.spec.option("offload_param") is not None)

    def full_state_dict(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        from ddl_magics.strategies import zero_shards

        return zero_shards.full_state(module)

    def load_full_state_dict(self, module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
        from ddl_magics.strategies import zero_shards

        zero_shards.load_full_state(module, state)

    def inference(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        from ddl_magics.strategies import zero_whole

        return zero_whole.whole(module) if self.stage == 3 else nullcontext()

    def rebind(self) -> None:
        """Clone the world for DeepSpeed again, and move all shards to the new one."""
        from ddl_magics.strategies import zero_library, zero_shards

        zero_library.clone_world()
        if self.stage == 3:
            zero_shards.rebind()

    def close(self) -> None:
        from ddl_magics.strategies import zero_library

        zero_library.leave(self)
