"""What stands behind a prepared model that cannot be used any more: each use says why instead of waiting for ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies.base import Prepared

if TYPE_CHECKING:
    import torch


class Closed(Prepared):
    """Keeps the module, for `ddl.unwrap`, and the reason."""

    def __init__(self, prepared: Prepared, why: str) -> None:
        self.strategy = prepared.strategy
        self.module = prepared.module
        self.optimizer = prepared.optimizer
        self._why = why

    def refuse(self) -> NoReturn:
        """Raise UsageOnRankError with the reason."""
        name = type(self.module).__name__
        raise UsageOnRankError(f"{name} cannot be used any more: {self._why}", "Build and prepare it again.")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse()

    def backward(self, loss: torch.Tensor, boundary: bool) -> NoReturn:
        self.refuse()

    def step(self, max_norm: float | None) -> NoReturn:
        self.refuse()

    def full_state_dict(self) -> NoReturn:
        self.refuse()

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> NoReturn:
        self.refuse()

    def sync_generate(self) -> NoReturn:
        self.refuse()

    def measure(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing is held any more."""
