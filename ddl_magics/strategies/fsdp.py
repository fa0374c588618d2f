"""`fsdp`: torch's fully sharded data parallelism, which shards parameters, gradients and optimizer state by rows.

PyTorch's `fully_shard` ("FSDP2"; Zhao et al. 2023, arXiv:2304.11277, for the idea) over all ranks: each transformer
block is gathered for its forward and its backward and freed after, the rest of the model belongs to the root, see
`fsdp_blocks`. Option `offload=cpu` keeps the shards, their gradients and the optimizer's step on the host.

Limits: each rank builds the whole model on its host once, so that its weights are those of one process. Every forward
is a collective, also in evaluation: all ranks call it equally often. Gradients are reduced at every backward of an
accumulation, so that none of them is ever whole on a rank. After `close` a model is still sharded: only `fsdp` can
prepare it again. Parameters without dimensions are refused. Hybrid sharding (within a node only) is not offered.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from ddl_magics.strategies.base import Prepared, Strategy, Training
from ddl_magics.strategies.spec import StrategySpec, known_options, no_argument

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from ddl_magics.protocol import World
    from ddl_magics.strategies.base import Whole


class FSDP(Strategy):
    """Every rank holds its rows of everything: all shares are 1/N."""

    name: ClassVar[str] = "fsdp"

    def __init__(self, spec: StrategySpec, world: World) -> None:
        super().__init__(spec, world)
        self._mesh: DeviceMesh | None = None

    @classmethod
    def parse(cls, argument: str, options: dict[str, str]) -> StrategySpec:
        no_argument(cls.name, argument)
        known_options(cls.name, options, {"offload": ("cpu",)})
        return StrategySpec(cls.name, options=tuple(sorted(options.items())))

    @classmethod
    def shares(cls, spec: StrategySpec, world_size: int) -> dict[str, float]:
        """1/N of everything, as ZeRO's stage 3 (Rajbhandari et al. 2020, figure 1), which it follows.

        Not in it: what is gathered while a block computes, and rows that pad a parameter to a multiple of N rows.
        """
        return dict.fromkeys(("parameters", "gradients", "optimizer"), 1 / world_size)

    @property
    def offload(self) -> bool:
        return self.spec.option("offload") == "cpu"

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks in a row, over the default process group."""
        if self._mesh is None:
            from ddl_magics.strategies import fsdp_shards

            self._mesh = fsdp_shards.mesh_of_all_ranks(self.world.device)
        return self._mesh

    def model_init(self) -> AbstractContextManager[None]:
        """Build the plain model, so that it draws what one process draws; `prepare` shards it."""
        return nullcontext()

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, training: Training) -> Prepared:
        from ddl_magics.strategies.common import claim
        from ddl_magics.strategies.fsdp_module import FSDPPrepared

        return claim(FSDPPrepared(self, model, optimizer, training))

    def materialise(self, module: torch.nn.Module, read: Callable[[str], Whole]) -> None:
        from ddl_magics.strategies import fsdp_shards

        fsdp_shards.materialise(module, read, self.mesh, "cpu" if self.offload else self.world.device)

    def full_state_dict(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        from ddl_magics.strategies import fsdp_shards

        return fsdp_shards.full_state(module)

    def load_full_state_dict(self, module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
        from ddl_magics.strategies import fsdp_shards

        fsdp_shards.load_full_state(module, state)

    def inference(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        from ddl_magics.strategies import fsdp_shards
        from ddl_magics.strategies.common import unprepared

        if any(map(fsdp_shards.is_sharded, module.parameters())):
            raise unprepared(module, self)
        return nullcontext()

    def rebind(self) -> None:
        """Forget the mesh over the old group; the next prepare, and `Prepared.rebind`, make one over the new."""
        self._mesh = None

    def close(self) -> None:
        self._mesh = None
