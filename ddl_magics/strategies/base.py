"""What a strategy is: one small class, loaded by name from the entry-point group `ddl_magics.strategies`.

The notebook loads strategy files too, to check options before any rank works, and must not import torch. So a
strategy file imports torch and its library inside the methods that run on ranks, never at its top.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies.looks import Looks
from ddl_magics.strategies.updates import Updates

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from ddl_magics.protocol import World
    from ddl_magics.strategies.spec import StrategySpec


@dataclass(frozen=True)
class Training:
    """What a cell asked of `prepare`, the same for every strategy."""

    precision: str = "32"
    """`32`, `bf16-mixed` (fp32 weights, autocast to bf16) or `bf16-true` (weights in bf16)."""
    accumulate: int = 1
    """Calls of `backward` for each optimizer step."""


class Strategy(ABC):
    """One strategy on one rank, alive from the first cell that names it until the session ends."""

    name: ClassVar[str]
    """The first word of its spec."""
    alone: ClassVar[bool] = False
    """Its models use no process group: each is of its own process, and what becomes of the group is nothing to it."""

    def __init__(self, spec: StrategySpec, world: World) -> None:
        self.spec = spec
        self.world = world

    @classmethod
    @abstractmethod
    def parse(cls, argument: str, options: dict[str, str]) -> StrategySpec:
        """`zero:3,offload=cpu` arrives as `("3", {"offload": "cpu"})`. Raises SpecError with the valid values."""

    @classmethod
    def check(cls, spec: StrategySpec, world_size: int, local_world_size: int) -> StrategySpec:
        """Resolve defaults that need the world (bare `axonn`); raise SpecError, every factor named, if it cannot run.

        Runs in the notebook, without torch. A missing library is found here too, by `importlib.util.find_spec`.
        """
        return spec

    @classmethod
    def shares(cls, spec: StrategySpec, world_size: int) -> dict[str, float]:
        """Share of the whole model's parameters, gradients and optimizer state that one rank holds (1.0: all).

        Keys `parameters`, `gradients`, `optimizer`; the source of each figure is in the docstring of the strategy.
        """
        return {"parameters": 1.0, "gradients": 1.0, "optimizer": 1.0}

    @property
    def data_rank(self) -> int:
        """Which slice of the global batch this rank computes, 0 <= data_rank < data_size."""
        return self.world.rank

    @property
    def data_size(self) -> int:
        """Over how many slices a global batch is split."""
        return self.world.world_size

    @abstractmethod
    def model_init(self) -> AbstractContextManager[None]:
        """Within it, modules are built with the values that one process would draw from the present RNG state.

        The caller has seeded torch. The strategy may shard when the block ends.
        """

    @abstractmethod
    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, training: Training) -> Prepared:
        """Place, shard and wrap a model and the optimizer that the user made over its parameters."""

    def full_state_dict(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Whole weights of a module of this strategy's `model_init`, before `prepare`; see `Prepared`."""
        from ddl_magics.strategies.common import full_state

        return full_state(module)

    def load_full_state_dict(self, module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
        """Whole weights into a module of this strategy's `model_init`, before `prepare`; see `Prepared`."""
        from ddl_magics.strategies.common import load_full_state

        load_full_state(module, state)

    def rebind(self) -> None:
        """Make this strategy's own groups anew over the default group, which was made anew; a collective.

        All ranks call it, strategies in the same order, and then `Prepared.rebind` of each model. Nothing of the old
        groups works any more. A failure half-way leaves the strategy fit for `close` alone.
        """

    def close(self) -> None:
        """Free process groups and threads of this strategy. Prepared models must have been closed before."""


class Prepared(ABC):
    """A model with its optimizer under one strategy: what the context's `backward` and `step` act on."""

    strategy: Strategy
    module: torch.nn.Module
    """The user's own module (`ddl.unwrap`), parameters possibly sharded."""
    optimizer: torch.optim.Optimizer | None
    """What the user's loop holds: `param_groups` drive learning-rate schedulers."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about what `prepare` made of the model; the context shows each once."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, under the autocast that the precision asks for."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, boundary: bool) -> None:
        """Backward of a loss that is already scaled.

        `boundary`: the last of the accumulation, after which gradients are averaged over `data_size` ranks; before it
        they stay on the rank where the strategy allows. Gradients are then the mean over data ranks of the gradients
        of their scaled losses.
        """

    @abstractmethod
    def step(self, max_norm: float | None) -> float | torch.Tensor | None:
        """Clip the gradient of the whole model to `max_norm` (L2), update, zero the gradients.

        Returns the norm before clipping, as a float or a 0-dim tensor (never synchronising CUDA by itself),
        the same on all ranks; None where the library tells no norm and none was asked for.
        """

    @abstractmethod
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole weights on the CPU, unprefixed names, on every rank. A collective: all ranks call it."""

    @abstractmethod
    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Whole weights in, every rank given the same. Raises on missing, unexpected or misshaped names."""

    def rebind(self) -> None:
        """Work over the process group that was made anew, whatever the old one broke off; a collective.

        Weights and optimizer state of this rank stay as they are, gradients are dropped. Where a rank holds weights
        that others own, they become the owner's. Comes after `Strategy.rebind`; all ranks call it, models in the
        same order. A failure half-way leaves the model fit for `close` alone. Where the strategy is `alone` only the
        rank that has the model calls it, and it drops the gradients.
        """
        raise UsageOnRankError(
            f"{self.strategy.spec.text} cannot take a model over into a new process group",
            "Build and prepare it again.",
        )

    def sync_generate(self) -> bool:
        """Whether ranks that finish generation early must go on taking part (`synced_gpus`)."""
        return False

    @abstractmethod
    def measure(self) -> dict[str, int]:
        """Bytes this rank holds now as `parameters`, `gradients`, `optimizer`; each storage counted once.

        Called on the thread that trains: no collective, no CUDA call.
        """

    @functools.cached_property
    def looks(self) -> Looks:
        """When the memory was looked at. Strategies look at the end of `prepare`, of `backward` and of `step`."""
        return Looks()

    @functools.cached_property
    def updates(self) -> Updates:
        """How often the optimizer has changed the weights. Strategies let it watch the optimizer that does."""
        return Updates()

    def memory(self) -> dict[str, int]:
        """What `measure` tells, on the thread that trains; on any other, such as the sampler's, the last look."""
        return self.looks.now(self.measure)

    @abstractmethod
    def close(self) -> None:
        """Free what the wrapper holds (hooks, buckets, engine). The module stays usable where that is possible."""
