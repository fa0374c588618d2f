"""After how many optimizer steps a loop ends: its own number (`track(..., steps=N)`), or its cell's (`--steps N`).

Steps are counted by model, so that a cell may train several, at once or one after the other. Every rank counts alike,
since `step` acts on all of them together, and so all leave the loop after the same batch. Limits: that a step was
made is known when the loop's body is over; a loop without steps, such as an evaluation, never ends so.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import UsageOnRankError

if TYPE_CHECKING:
    from ddl_magics.rank.training import Training


class Steps:
    """Optimizer steps of one cell, by model.

    Parameters
    ----------
    most
        Steps of a model after which the cell's loops end; None: they do not.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._made: weakref.WeakKeyDictionary[Training, int] = weakref.WeakKeyDictionary()
        self._over: list[tuple[Any, int]] = []
        """What was looped over when that happened, and how many models had been prepared by then."""

    def loop(self, items: Any, steps: int | None, training: Training | None, models: int) -> Limit | None:
        """Where a loop over `items` ends that begins now; None where nowhere but at its end.

        `steps` is its own number, `training` the model that it trains where that is known. After the cell's steps
        another loop over the same items ends at once, unless a model was prepared meanwhile.
        """
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise UsageOnRankError(f"track(steps={steps!r}) cannot be", "Give a whole number of optimizer steps.")
        if steps is None and self.most is None:
            return None
        limits = [] if steps is None else [steps]
        if self.most is not None:
            is_over = any(items is over and models == then for over, then in self._over)
            made = 0 if training is None else self._made.get(training, 0)
            limits.append(0 if is_over else max(self.most - made, 1))
        return Limit(self, steps, min(limits), 1 if training is None else training.accumulate)

    def count(self, training: Training) -> bool:
        """Count a step of a model; whether it is the last of the cell's."""
        made = self._made[training] = self._made.get(training, 0) + 1
        return self.most is not None and made >= self.most

    def loop_is_over(self, items: Any, models: int) -> None:
        """The cell's steps were reached in a loop over `items`."""
        self._over.append((items, models))


class Limit:
    """How many optimizer steps one loop makes."""

    def __init__(self, cell: Steps, steps: int | None, shown: int, batches: int) -> None:
        self._cell = cell
        self._steps = steps
        self._shown = shown
        self.batches = batches
        """Batches of one step."""
        self._by_model: Counter[int] = Counter()
        self.reached = shown == 0
        """The loop ends here."""
        self.cell_reached = False
        """So do all loops of the cell over the same items."""

    def count(self, training: Training) -> None:
        """Count a step that a model made in this loop."""
        self._by_model[id(training)] += 1
        self.cell_reached = self._cell.count(training) or self.cell_reached
        self.reached = self.cell_reached or (self._steps is not None and self.made >= self._steps)

    @property
    def made(self) -> int:
        """Steps in this loop, of the model with the most."""
        return max(self._by_model.values(), default=0)

    def total(self, batches: int | None) -> int:
        """Steps that this loop will make over so many batches; None where nobody knows how many there are."""
        return self._shown if batches is None else min(self._shown, math.ceil(batches / self.batches))
