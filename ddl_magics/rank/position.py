"""How far the training is in a loader: told in words that hold at any number of ranks, and taken up again.

An epoch is a sequence of items (samples, or the batches of a user's own batch sampler) in an order that a seed and the
epoch's number give. What an optimizer step has seen is done. A batch that was given out since, in the middle of an
accumulation or before its step, is still to be done, and so is all of an epoch that nothing was trained in yet, as
long as it is under way. Limits: an epoch that ended or broke off without a step (an evaluation, a look at one batch)
counts as begun and no more.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ddl_magics.rank.batches import RankBatches


@dataclasses.dataclass(frozen=True)
class Position:
    """How far the training is in a loader."""

    epoch: int = 0
    """Number of the epoch, by which its order is drawn."""
    batches: int = 0
    """Global batches of it that are done."""
    items: int = 0
    """Items of its order that are done, see `RankBatches.items`; 0 where the order is not ours."""
    length: int | None = None
    """Items in an epoch, where that is known."""
    seed: int | None = None
    """Of the order, where the order is ours."""
    epochs: int = 0
    """Epochs that were trained to their end."""


class Place(NamedTuple):
    """A place in an epoch."""

    epoch: int
    batches: int
    last: bool
    """The epoch ends here."""


class Bookmark:
    """Keeps the place in one loader; `batches` None: its order is not ours."""

    def __init__(self, batches: RankBatches | None) -> None:
        self._batches = batches
        self.epoch = 0
        """Of the next `iter`."""
        self.behind = 0
        """Epochs that were trained before a load and that a loop over all of them has still to pass over."""
        self.running = False
        """A batch of an epoch is given out, and the epoch has not ended."""
        self._given = self._trained = Place(-1, 0, last=True)
        self._first = Position()
        """Where the epoch of that number begins."""
        self._epochs = 0

    # An epoch's life

    def begin(self) -> int:
        """An epoch begins with the next batch; returns its number."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        self.behind = 0
        return epoch

    def give(self, epoch: int, batches: int, *, last: bool) -> None:
        """So many batches of an epoch have been given out now."""
        self.running = True
        self._given = Place(epoch, batches, last)

    def trained(self) -> None:
        """An optimizer step was made: what has been given out of the epoch under way is done."""
        if self.running and self._trained != self._given:
            self._trained = self._given
            self._epochs += self._given.last

    def pass_over(self, epochs: int) -> int:
        """How many of so many epochs were trained before a load; they are passed over with this."""
        passed = min(self.behind, epochs)
        self.behind -= passed
        return passed

    # What is known of an epoch

    def done(self, epoch: int) -> tuple[int, int]:
        """Batches and items of an epoch that were done before a load; 0 of any but the first."""
        if self._first.epoch != epoch:
            return 0, 0
        if self._batches is None:
            return self._first.batches, 0
        return self._batches_at(self._first.items), self._first.items

    def length(self, epoch: int) -> int | None:
        """Batches of an epoch, those of before a load too; None where nobody knows before it ends."""
        if self._batches is None or self._items() is None:
            return None
        batches, items = self.done(epoch)
        return batches + self._batches.left(items)

    # In and out of a checkpoint

    @property
    def is_ahead(self) -> bool:
        """Whether batches were given out of the epoch it trains in that no optimizer step has seen."""
        place = self._place()
        return self._given.epoch == place.epoch and self._given.batches > place.batches

    def position(self) -> Position:
        """How far the training is."""
        epoch, batches, last = self._place()
        if last:
            epoch, batches = epoch + 1, self.done(epoch + 1)[0]
        length, items, seed = self._items(), 0, None
        if self._batches is not None:
            before, first = self.done(epoch)
            items = first + (batches - before) * self._batches.items_of_batch
            items = items if length is None else min(items, length)
            seed = self._batches.seed
        return Position(epoch, batches, items, length, seed, self._epochs)

    def take_up(self, position: Position) -> str:
        """Go on from there with the next `iter`, also where a batch has another size now.

        Returns a sentence for the user, or an empty text where all is as it was.
        """
        said = ""
        if self._items() != position.length and position.batches:
            position = dataclasses.replace(position, batches=0, items=0)
            said = "A loader has another length than the saved one had: its epoch begins anew."
        elif self._batches is None and position.batches:
            said = "A loader that is left alone reads again what was done of its epoch, and drops it."
        if self._batches is not None and position.seed is not None:
            self._batches.seed = position.seed
        self.epoch = position.epoch
        self.behind = self._epochs = position.epochs
        self.running = False
        self._first = position
        self._given = self._trained = Place(position.epoch - 1, 0, last=True)
        return said

    def _place(self) -> Place:
        latest = self.epoch - 1
        if self._trained.epoch == latest:
            return self._trained
        return Place(latest, self.done(latest)[0], last=not self.running)

    def _batches_at(self, items: int) -> int:
        assert self._batches is not None
        return -(-items // self._batches.items_of_batch)

    def _items(self) -> int | None:
        if self._batches is None:
            return None
        try:
            return self._batches.items
        except TypeError:  # a sampler of the user's without a length
            return None
