"""Which rank continues which prompts, and the agreement of all ranks before they begin.

Every rank is given all prompts and takes the slice that is its turn, in order. So that no rank waits for another in
vain, each first says what stands in the way (a prompt too long, an option that does not exist) and what it was given.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.errors import DDLError, UsageOnRankError
from ddl_magics.rank import together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Row:
    """One text to be made."""

    prompt: int
    copy: int
    tokens: list[int]


@dataclass(frozen=True)
class Share:
    """Which of `size` parts of the prompts this rank continues."""

    rank: int
    size: int

    def slice_of(self, count: int, rank: int | None = None) -> range:
        """Numbers of this part out of `count`, as even as they divide, in order; the first parts have more."""
        rank = self.rank if rank is None else rank
        return range(-(-count * rank // self.size), -(-count * (rank + 1) // self.size))

    def batches(self, prompts: list[list[int]], copies: int, batch_size: int | None) -> Iterator[list[Row]]:
        """Rows of this part, in batches of `batch_size` prompts, None for all of them at once."""
        mine = self.slice_of(len(prompts))
        size = batch_size or max(len(mine), 1)
        for begin in range(mine.start, mine.stop, size):
            numbers = range(begin, min(begin + size, mine.stop))
            yield [Row(number, copy, prompts[number]) for number in numbers for copy in range(copies)]

    def turns(self, count: int, batch_size: int | None) -> int:
        """How many batches the part with the most of them has."""
        lengths = [len(self.slice_of(count, rank)) for rank in range(self.size)]
        return max(-(-length // (batch_size or max(length, 1))) for length in lengths)


@dataclass(frozen=True)
class Agreed:
    """What all ranks settled before they began."""

    seed: int
    whole: bool
    """Sharded weights are gathered once: every rank has the memory."""


def agree(
    share: Share, read: Callable[[], Any], seed: int | None, draws: Callable[[], bool], fits: Callable[[], bool]
) -> tuple[Any, Agreed]:
    """Let every rank read what it was given; a collective where there are several.

    Parameters
    ----------
    read
        Gives what JSON can hold and all ranks must have the same; raises what stands in the way.
    seed
        None for one that rank 0 draws from torch's present state. All ranks draw, so that they stay in step.
    draws
        Whether a seed is needed, after `read`: where nothing is drawn every generator stays as it is.
    fits
        Whether this rank has the memory for whole weights.

    Raises
    ------
    DDLError
        The same on all ranks: of this rank, or what the first rank that has one said.
    """
    given, failure = None, None
    try:
        given = read()
    except DDLError as error:
        failure = error
    drawn = seed or 0
    if seed is None and failure is None and draws():
        drawn = int(torch.randint(2**31, ()).item())
    told: dict[str, Any] = {
        "failure": None if failure is None else (failure.message, failure.remedy),
        "given": hashlib.blake2b(json.dumps(given).encode(), digest_size=16).hexdigest(),
        "seed": drawn,
        "fits": failure is None and fits(),
    }
    everyone = [told] if share.size == 1 else together.all_gather(told)
    if failure is not None:
        raise failure
    for rank, other in enumerate(everyone):
        if other["failure"] is not None:
            message, remedy = other["failure"]
            raise UsageOnRankError(f"{message} (on rank {rank})", remedy)
    strangers = [rank for rank, other in enumerate(everyone) if other["given"] != everyone[0]["given"]]
    if strangers:
        raise UsageOnRankError(
            f"Ranks {strangers} were given other prompts or options than rank 0",
            "Give all of them the same: generate deals the prompts out itself.",
        )
    return given, Agreed(everyone[0]["seed"], all(other["fits"] for other in everyone))
