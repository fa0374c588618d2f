"""`axonn`: linear layers split over a grid of ranks, the rest of the world data parallel.

The strategy runs the AxoNN package (Singh et al. 2024) in its easy mode: every rank computes its own slice of the
batch, and within a split layer the ranks of a grid exchange activations. Here stand the words; `grid` has the
arithmetic, and the parts that need torch are in the other files of this folder, loaded on ranks only.
Limits: splits `torch.nn.Linear` only, see `shard`; no pipelines.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from ddl_magics.strategies.axonn.grid import Grid
from ddl_magics.strategies.base import Prepared, Strategy, Training
from ddl_magics.strategies.spec import StrategySpec, known_options, require

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ddl_magics.protocol import World
    from ddl_magics.strategies.axonn.groups import Groups
    from ddl_magics.strategies.base import Whole


class AxoNN(Strategy):
    """`axonn:RxCxD`, row x column x depth; option `overlap=1` overlaps communication with computation."""

    name: ClassVar[str] = "axonn"
    not_compiled = "the ranks of a grid talk in every split layer, from Python"

    def __init__(self, spec: StrategySpec, world: World) -> None:
        super().__init__(self.check(spec, world.world_size, world.local_world_size), world)
        self._groups: Groups | None = None

    @classmethod
    def parse(cls, argument: str, options: dict[str, str]) -> StrategySpec:
        known_options(cls.name, options, {"overlap": ("0", "1")})
        given = tuple(pair for pair in sorted(options.items()) if pair != ("overlap", "0"))
        return StrategySpec(cls.name, Grid.parse(argument).text if argument else "", given)

    @classmethod
    def check(cls, spec: StrategySpec, world_size: int, local_world_size: int) -> StrategySpec:
        """Fill in the grid of bare `axonn`: a node's ranks, or as many of them as divide the world."""
        require(cls.name, "axonn", "axonn")
        if not spec.argument:
            grid = Grid.square(math.gcd(world_size, local_world_size))
            return StrategySpec(spec.name, grid.text, spec.options)
        Grid.parse(spec.argument).check(world_size)
        return spec

    @classmethod
    def shares(cls, spec: StrategySpec, world_size: int) -> dict[str, float]:
        """One over the ranks of the grid, of the weights that are split (Singh et al. 2024, section III).

        Not in it: what stays whole (embeddings, norms, tied layers) counts in full on every rank, and a bias is
        split by the row factor alone. Bare `axonn` counts as one node that is the world.
        """
        grid = Grid.parse(spec.argument) if spec.argument else Grid.square(world_size)
        return dict.fromkeys(("parameters", "gradients", "optimizer"), 1 / grid.size)

    def model_init(self) -> AbstractContextManager[None]:
        """Build the plain model, so that it draws what one process draws; `prepare` splits it layer by layer."""
        return nullcontext()

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, training: Training) -> Prepared:
        groups = self._open()
        from ddl_magics.strategies.axonn.prepared import AxoNNPrepared
        from ddl_magics.strategies.common import claim

        return claim(AxoNNPrepared(self, groups, model, optimizer, training))

    def materialise(self, module: torch.nn.Module, read: Callable[[str], Whole]) -> None:
        groups = self._open()
        from ddl_magics.strategies.axonn.materialise import materialise

        materialise(module, groups, read, self.world.device)

    def full_state_dict(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        if self._groups is None:  # nothing can be split yet
            return super().full_state_dict(module)
        from ddl_magics.strategies.axonn import state

        return state.full_state_dict(module)

    def load_full_state_dict(self, module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
        if self._groups is None:
            super().load_full_state_dict(module, state)
            return
        from ddl_magics.strategies.axonn.state import load_full_state_dict

        load_full_state_dict(module, state)

    def inference(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        if self._groups is not None:  # else nothing is split yet
            from ddl_magics.strategies.axonn.shard import parallel_layers
            from ddl_magics.strategies.common import unprepared

            if any(parallel_layers(module)):
                raise unprepared(module, self)
        return nullcontext()

    def _open(self) -> Groups:
        """Process groups of the grid, made at the first prepare and kept."""
        if self._groups is None:
            from ddl_magics.strategies.axonn.groups import Groups

            self._groups = Groups(Grid.parse(self.spec.argument), self.world)
        return self._groups

    def rebind(self) -> None:
        if self._groups is not None:
            self._groups.remake()

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()
            self._groups = None
