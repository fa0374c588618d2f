"""How often an optimizer has changed a model's weights, also in steps that failed after they had.

A library may step the user's optimizer in parts, one for each group of its own. Limits: an exception out of the
optimizer counts as a break in the middle of an update, also where it came before the first weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Updates:
    """Updates of one prepared model on this rank."""

    def __init__(self) -> None:
        self.count = 0
        """Updates of all its weights."""
        self.torn = False
        """An update broke off: some weights have moved, others have not. Until the next whole one."""
        self._parts = 1
        self._part = 0
        self._hooks: list[Any] = []
        self._watched: torch.optim.Optimizer | None = None

    def watch(self, optimizer: torch.optim.Optimizer, parts: int = 1) -> None:
        """Count the steps of this optimizer from now on, instead of another's; `parts` of them are one update."""
        self._parts, self._part = parts, 0
        if self._watched is optimizer:
            return  # hooks that the user laid meanwhile, and that may raise, stay behind ours
        self.forget()
        self._watched = optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._begin()),
            optimizer.register_step_post_hook(lambda *_: self._end()),
        ]

    def forget(self) -> None:
        """Leave the optimizer alone; what was counted stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._watched = None

    def count_on(self, steps: int) -> None:
        """Go on from `steps` updates, which the weights and the state that were loaded have behind them."""
        self.count, self.torn, self._part = steps, False, 0

    def _begin(self) -> None:
        self.torn = True

    def _end(self) -> None:
        self._part = (self._part + 1) % self._parts
        self.torn = self._part > 0
        self.count += not self.torn
