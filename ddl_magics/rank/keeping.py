"""The context's calls for weights and checkpoints: whole weights in and out, save, load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddl_magics.rank.model import training_of
from ddl_magics.rank.scope import Scope

if TYPE_CHECKING:
    import torch


class Keeping(Scope):
    """What is kept of a model."""

    def full_state_dict(self, model: Any) -> dict[str, torch.Tensor]:
        """Whole weights on the CPU, unprefixed names, before or after `prepare`; a collective."""
        training = training_of(model)
        return self._strategy().full_state_dict(model) if training is None else training.prepared.full_state_dict()

    def load_full_state_dict(self, model: Any, state: dict[str, torch.Tensor]) -> None:
        """Whole weights in, before or after `prepare`; a collective, every rank gives the same."""
        training = training_of(model)
        if training is None:
            self._strategy().load_full_state_dict(model, state)
        else:
            training.prepared.load_full_state_dict(state)
