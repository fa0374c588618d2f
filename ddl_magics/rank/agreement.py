"""Ranks tell one another something through the store, which works also while their process group does not.

Limits: a rank that never comes is waited for as long as a collective would wait. The waiting thread asks the store
again and again, so that an interrupt reaches it.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank import group

if TYPE_CHECKING:
    from torch.distributed import Store

_talks: dict[str, tuple[int, int]] = {}
"""By occasion: in which generation of the group the last talk was, and the how many-th in it."""

POLL = 0.005
"""Seconds between two questions to the store."""


class Agreement:
    """One talk among all ranks of the present group; each of them makes one, on the same occasion.

    Parameters
    ----------
    occasion
        What the talk is about: ranks of one occasion hear one another.
    """

    def __init__(self, occasion: str) -> None:
        opened = group.opened()
        if opened is None:
            raise UsageOnRankError("No process group was opened", "Call open_group first.")
        before = _talks.get(occasion, (0, 0))
        _talks[occasion] = opened.generation, before[1] + 1 if before[0] == opened.generation else 1
        prefix = f"agreement/{occasion}/{_talks[occasion][1]}"
        self._store: Store = dist.PrefixStore(prefix, group.shared_store())
        self._rank, self._size = opened.world.rank, opened.world.world_size
        self._patience = opened.timeout.total_seconds()
        self._round = 0

    def hear(self, value: Any) -> list[Any]:
        """Tell all ranks `value`, which JSON can hold, and give what each rank told in this round, in rank order.

        Raises
        ------
        UsageOnRankError
            Some ranks did not come.
        """
        self._round += 1
        self._store.set(f"{self._round}/{self._rank}", json.dumps(value))
        keys = [f"{self._round}/{rank}" for rank in range(self._size)]
        self._wait(keys)
        told = [json.loads(self._store.get(key)) for key in keys]
        # Who tells something in this round has read the one before.
        self._store.delete_key(f"{self._round - 1}/{self._rank}")
        return told

    def _wait(self, keys: list[str]) -> None:
        deadline = time.monotonic() + self._patience
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise UsageOnRankError(f"Ranks {missing} did not answer the others", "Restart them: %ddl restart.")
            time.sleep(POLL)
