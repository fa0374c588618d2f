"""The prepared models of a rank that still live, and which of them a call means."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank.model import Model, training_of

if TYPE_CHECKING:
    from ddl_magics.rank.training import Training


class Models:
    """Wrappers that `prepare` gave out, held weakly: a model lives as long as the user's names for it."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []

    def wrap(self, training: Training) -> Model:
        """Make the wrapper of a prepared model."""
        model = Model(training)
        self._known = [known for known in self._known if known() is not None] + [weakref.ref(model)]
        return model

    def live(self) -> list[Training]:
        """What stands behind each wrapper that lives, in the order of `prepare`."""
        found = [training_of(known()) for known in self._known]
        return [training for training in found if training is not None]

    def collect(self) -> None:
        """Free models whose last name is gone but which a cycle of references still holds."""
        gc.collect()
        self._known = [known for known in self._known if known() is not None]

    def meant(self, model: Any, call: str, cell: int) -> Training:
        """Which model a call means: the one given, or the only one prepared in this cell, used in it, or alive.

        Raises
        ------
        UsageOnRankError
            None is prepared, several could be meant, or it belongs to a process group that is gone.
        """
        training = self._only(call, cell) if model is None else training_of(model)
        if training is None:
            raise UsageOnRankError(
                f"{call}(model=...) was given a {type(model).__name__}", "Give the model that prepare returned."
            )
        if training.closed:
            raise UsageOnRankError(
                f"{training.name} was prepared before the process group was made anew", "Build and prepare it again."
            )
        return training

    def _only(self, call: str, cell: int) -> Training:
        live = self.live()
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
