"""The prepared models of a rank that still live, and which of them a call means."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank.closed import Closed
from ddl_magics.rank.model import Model, training_of

if TYPE_CHECKING:
    from ddl_magics.rank.training import Training


class Models:
    """Wrappers that `prepare` gave out, held weakly: a model lives as long as the user's names for it."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []
        self.counts: dict[str, int] = {}
        """How many were prepared under each strategy."""

    def wrap(self, training: Training) -> Model:
        """Make the wrapper of a prepared model, and give it the key by which ranks know it from others."""
        text, module = training.prepared.strategy.spec.text, training.prepared.module
        self.counts[text] = self.counts.get(text, 0) + 1
        size = len(list(module.parameters()))
        training.key = f"{text} {self.counts[text]} {type(module).__name__} {size}"
        model = Model(training)
        self._known = [known for known in self._known if known() is not None] + [weakref.ref(model)]
        return model

    @property
    def prepared(self) -> int:
        """How many there have been so far."""
        return sum(self.counts.values())

    def live(self) -> list[Training]:
        """What stands behind each wrapper that lives, in the order of `prepare`."""
        found = [training_of(known()) for known in self._known]
        return [training for training in found if training is not None]

    def sort(self, keys: list[str]) -> None:
        """Put those with these keys into their order, after the others."""
        place = {key: number for number, key in enumerate(keys)}

        def place_of(known: weakref.ref[Any]) -> int:
            training = training_of(known())
            return place.get(training.key, -1) if training is not None else -1

        self._known.sort(key=place_of)

    def names(self) -> dict[str, Training]:
        """Open models by name, in the order of `prepare`; of several of a kind all but the first have a number."""
        found: dict[str, Training] = {}
        for training in self.live():
            if not training.closed:
                same = sum(name.partition(" ")[0] == training.name for name in found)
                found[f"{training.name} {same + 1}" if same else training.name] = training
        return found

    def collect(self) -> None:
        """Free models whose last name is gone but which a cycle of references still holds."""
        gc.collect()
        self._known = [known for known in self._known if known() is not None]

    def meant(self, model: Any, call: str, cell: int) -> Training:
        """Which model a call means: the one given, or the only one prepared in this cell, used in it, or alive.

        Raises
        ------
        UsageOnRankError
            None is prepared, several could be meant, it was closed, or a load of it broke off.
        """
        training = self._only(call, cell) if model is None else training_of(model)
        if training is None:
            raise UsageOnRankError(
                f"{call}(model=...) was given a {type(model).__name__}", "Give the model that prepare returned."
            )
        if isinstance(training.prepared, Closed):
            training.prepared.refuse()
        if call != "load":  # which heals it
            training.require_whole()
        return training

    def _only(self, call: str, cell: int) -> Training:
        live = self.live()
        live = [training for training in live if not training.closed] or live
        candidates = [training for training in live if training.prepared.optimizer is not None] or live
        candidates = [training for training in candidates if training.cell == cell] or candidates
        candidates = [training for training in candidates if training.used] or candidates
        if not candidates:
            raise UsageOnRankError(f"{call} was called and no model is prepared", "Call ddl.prepare before.")
        if len(candidates) > 1:
            names = ", ".join(training.name for training in candidates)
            raise UsageOnRankError(
                f"{call} cannot tell which of {names} is meant", f"Write ddl.{call}(..., model=...)."
            )
        return candidates[0]
