"""One prepared model in training: which calls of `backward` and `step` act, and how a loss is scaled.

Accumulation counts calls of `step`: the k-th acts, and so does the last batch of an epoch. A loss is divided by the
number of batches that its group will have, so that each optimizer step follows the mean gradient of its batches,
also the short group at the end of an epoch whose length is known. Where no length is known (iterable datasets) a
short last group is divided by k like the others, as if the missing batches had no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank.checkpoint import randomness
from ddl_magics.rank.closed import Closed
from ddl_magics.rank.parts import steps_by_itself

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from ddl_magics.rank.batches import Share
    from ddl_magics.rank.checkpoint.randomness import State
    from ddl_magics.rank.data import RankLoader
    from ddl_magics.strategies.base import Prepared
    from ddl_magics.strategies.recompute import Recomputation


class Training:
    """A prepared model, with the schedulers and loaders of its `prepare`."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        schedules: list[Any],
        loaders: list[RankLoader],
        group_names: list[list[str]],
        accumulate: int,
        cell: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        recomputation: Recomputation | None = None,
    ) -> None:
        self.prepared: Prepared = prepared
        self.schedules = schedules
        """Learning-rate schedulers, those that a user steps by a metric too."""
        self.loaders = loaders
        self.group_names = group_names
        """Names of the parameters in each group of the optimizer."""
        self.accumulate = accumulate
        self.cell = cell
        self.autocast = autocast
        self.recomputation = recomputation
        self.key = ""
        """What it is on every rank: its strategy, its number under it, and its kind; see `Models`."""
        self.closed = False
        self.half_loaded = False
        """A load changed it and did not come to its end, here or on another rank."""
        self.used = False
        """Its forward was called in this cell."""
        self.batches = 0
        """Calls of `backward` that all its steps have followed."""
        self.random: State | None = None
        """Random state after the last step, where more batches may have been begun since."""
        self._fresh = 0
        """Calls of `backward` since the last step."""
        self._calls = 0
        """Calls of `step` in this group that did not act."""
        self._group = accumulate
        """Batches of this group."""
        self._boundary = False
        self._waiting = False
        """A gradient waits for `step`."""
        self._under_way = False
        """A backward or a step began and has not ended; it failed, where nobody is in it."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self.prepared.module).__name__

    def require_whole(self) -> None:
        """Raise UsageOnRankError where a load broke off; the same on all ranks, see `reading.load`."""
        if self.half_loaded:
            message = f"A load of this {self.name} broke off: it holds old and new weights"
            raise UsageOnRankError(message, "Load again, or build it anew.")

    def share(self) -> Share | None:
        """Of the batch that its loaders gave out last; None where it has none under way."""
        running = [loader for loader in self.loaders if loader.share is not None]
        return max(running, key=lambda loader: loader.turn).share if running else None

    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor, share: Share | None) -> None:
        """Backward of a loss times `factor`, divided by the batches of its group."""
        if self._calls == 0:
            left = share.length - share.index if share is not None and share.length is not None else self.accumulate
            self._group = min(self.accumulate, left)
        self._boundary = self._calls + 1 >= self._group or (share is not None and share.last)
        if isinstance(factor, torch.Tensor):
            loss = loss * (factor / self._group).to(loss.dtype)
        elif factor != self._group:
            loss = loss * (factor / self._group)
        self._under_way = True
        self.prepared.backward(loss, self._boundary)
        self._under_way = False
        self._waiting = True
        self._fresh += 1

    def at_boundary(self) -> bool:
        """Whether the next `step` acts."""
        return self._waiting and self._boundary

    def step(self, max_norm: float | None) -> float | torch.Tensor | None:
        """Optimizer and schedule, when it is their turn; returns the gradient's norm then."""
        if not self._waiting:
            raise UsageOnRankError("step was called and there is no gradient yet", "Call ddl.backward(loss) before.")
        self._waiting = False
        self._calls += 1
        if not self._boundary:
            return None
        self._calls = 0
        before = self.steps
        self._under_way = True
        try:
            norm = self.prepared.step(max_norm)
            self._under_way = False
        finally:
            # Also where the step failed on its way to the other ranks, after the update.
            if not self._under_way or self.steps > before:
                self._made_step()
        return norm

    def _made_step(self) -> None:
        for schedule in self.schedules:
            if steps_by_itself(schedule):
                schedule.step()
        for loader in self.loaders:
            loader.bookmark.trained()
        self.batches, self._fresh = self.batches + self._fresh, 0
        if self.accumulate > 1:
            self.random = randomness.take()

    @property
    def unsettled(self) -> bool:
        """Whether a step is half made: gradients wait for more, or for `step`, or a backward or a step failed."""
        return self._waiting or self._calls > 0 or self._under_way

    @property
    def steps(self) -> int:
        """Optimizer steps that changed the weights of this rank."""
        return self.prepared.updates.count

    def rebind(self) -> None:
        """Go over to the process group that was made anew; gradients and half an accumulation are dropped.

        A collective, unless its strategy is `alone`.
        """
        self._calls = self._fresh = 0
        self._group = self.accumulate
        self._boundary = self._waiting = self._under_way = False
        self.prepared.rebind()

    def close(self, why: str = "it was closed") -> None:
        """Let the strategy go of the model, every later use of which says why; safe to call twice."""
        if not self.closed:
            self.closed = True
            prepared, self.prepared = self.prepared, Closed(self.prepared, why)
            prepared.close()
            if self.recomputation is not None:
                self.recomputation.undo()
