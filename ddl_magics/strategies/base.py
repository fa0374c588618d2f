"""What a strategy is: one small class, loaded by name from the entry-point group `ddl_magics.strategies`.

The notebook loads strategy files too, to check options before any rank works, and must not import torch. So a
strategy file imports torch and its library inside the methods that run on ranks, never at its top.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies.looks import Looks
from ddl_magics.strategies.updates import Updates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
    checkpoint_activations: bool = False
    """Keep only the inputs of each block for the backward, which computes the rest again."""


class Entry(NamedTuple):
    """One tensor of a prepared model as a checkpoint knows it: whole, and the same under every strategy."""

    name: str
    """Of the parameter or buffer, as in `state_dict` of the plain module."""
    kind: str
    """`weight`, also for buffers; `master` for fp32 weights beside bf16 ones; else the optimizer's own word for a
    part of its state, such as `exp_avg`, `momentum_buffer` or `step`."""
    shape: tuple[int, ...]
    """Of the whole tensor; `()` for a count of steps."""
    dtype: torch.dtype


class Whole(Protocol):
    """A whole tensor that is read as far as somebody asks: a torch.Tensor, or a slice of a safetensors file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part, such as `[4:8]`, `[:, 2:4]` or `[...]` for all of it; on the CPU."""


class Strategy(ABC):
    """One strategy on one rank, alive from the first cell that names it until the session ends."""

    name: ClassVar[str]
    """The first word of its spec."""
    alone: ClassVar[bool] = False
    """Its models use no process group: each is of its own process, and what becomes of the group is nothing to it."""

    not_compiled: str = ""
    """Why `torch.compile` is left out for its models, as the end of a sentence; empty where they train compiled."""

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

    def materialise(self, module: torch.nn.Module, read: Callable[[str], Whole]) -> None:
        """Give a module whose parameters are on the meta device its weights, as far as this rank holds them.

        `read` gives the whole tensor of a parameter or persistent buffer by its first name; buffers are made already.
        All ranks call it, for the same module; `prepare` takes it afterwards.
        """
        from ddl_magics.strategies.homes import read_whole

        read_whole(module, read, self.world.device)

    def full_state_dict(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Whole weights of a module of this strategy's `model_init`, before `prepare`; see `Prepared`."""
        from ddl_magics.strategies.weights import full_state

        return full_state(module)

    def load_full_state_dict(self, module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
        """Whole weights into a module of this strategy's `model_init`, before `prepare`; see `Prepared`."""
        from ddl_magics.strategies.weights import load_full_state

        load_full_state(module, state)

    def inference(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """What forwards without gradients of a module that was not prepared run in; within, each rank computes alone.

        Entering is a collective where `model_init` shards. Raises UsageOnRankError for shards that cannot compute so.
        """
        return nullcontext()

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

    def entries(self) -> list[Entry]:
        """What a checkpoint of this model consists of, the same on all ranks in the same order; no collective.

        Weights, then masters, then the optimizer's state. Tied names are one entry, under the first of them. What an
        optimizer has not begun to keep is not there. UsageOnRankError where it keeps what no file can hold.
        """
        raise self._not_kept()

    def gather(self, entry: Entry, to: int) -> torch.Tensor | None:
        """Whole tensor of an entry on the CPU of rank `to`, in storage of its own, None on the others; a collective.

        Memory beside the model: this one tensor, also on the others where the library knows no other way. Only the
        ranks that hold a part of it talk, and the others go on at once: entries to several ranks overlap.
        """
        raise self._not_kept()

    def put(self, items: Iterable[tuple[Entry, Whole]]) -> tuple[str, ...]:
        """Take over whole tensors: each rank is given the same, in the same order, and keeps its share of each.

        Weights come first, then masters, then the optimizer's state, after `resume_at`. What is not given stays as it
        is, and so does state of a parameter that this optimizer does not hold; names and shapes were checked by the
        caller. A tensor need not outlive its turn: of each only what this rank holds is read where that can be.
        Returns sentences for the user about what could not be taken over as it was.
        """
        raise self._not_kept()

    def resume_at(self, steps: int) -> None:
        """Before `put` of an optimizer's state: forget the present one, and count updates on from `steps`."""
        raise self._not_kept()

    def _not_kept(self) -> UsageOnRankError:
        return UsageOnRankError(
            f"{self.strategy.spec.text} has no checkpoints", "Save ddl.full_state_dict(model) instead."
        )

    def sync_generate(self) -> bool:
        """Whether ranks that finish generation early must go on taking part (`synced_gpus`)."""
        return False

    @property
    def can_be_whole(self) -> bool:
        """Whether `inference(whole=True)` lets each rank of a sharded model compute without the others."""
        return False

    def inference(self, *, whole: bool) -> AbstractContextManager[None]:
        """What many forwards without gradients run in, such as those that generate text.

        With `whole` every rank holds the whole weights within, gathered once, and computes without the others, where
        `can_be_whole`; entering is a collective then. Without, each forward gathers as it does in training.
        """
        return nullcontext()

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
