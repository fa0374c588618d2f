"""Which rank writes what: whole tensors shared out evenly, the weights over as many files as are worth it.

Pure arithmetic over the entries, which are the same on all ranks, so that nobody needs to ask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.strategies.base import Entry

SMALLEST = 32 * 2**20
LARGEST = 5 * 2**30
"""Bytes of a file of weights: fewer are not worth a second file; more are hard to move and to map."""


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file."""

    name: str
    rank: int
    """Who writes it."""
    entries: tuple[Entry, ...]


def nbytes(entry: Entry) -> int:
    """Bytes of the whole tensor."""
    return math.prod(entry.shape) * entry.dtype.itemsize


def weight_files(weights: Sequence[Entry], ranks: int) -> list[WeightFile]:
    """Share weights out over files, and files over ranks; names as Hugging Face's."""
    total = sum(map(nbytes, weights))
    count = max(1, min(ranks, total // SMALLEST), math.ceil(total / LARGEST))
    places = even(weights, count)
    names = (
        ["model.safetensors"] if count == 1 else [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
    )
    return [
        WeightFile(name, k % ranks, tuple(entry for entry, place in zip(weights, places, strict=True) if place == k))
        for k, name in enumerate(names)
    ]


def states_owners(states: Sequence[Entry], files: Sequence[WeightFile], ranks: int) -> list[int]:
    """Rank that writes each of the optimizer's tensors, such that with the weights all have about as much to do."""
    return even(
        states, ranks, [sum(nbytes(e) for f in files if f.rank == rank for e in f.entries) for rank in range(ranks)]
    )


def even(entries: Sequence[Entry], places: int, loads: Sequence[int] = ()) -> list[int]:
    """Place of each entry, such that all places have about as many bytes: the largest first, where there is least.

    `loads`: bytes that the places have already.
    """
    loads = list(loads) or [0] * places
    chosen = [0] * len(entries)
    for index in sorted(range(len(entries)), key=lambda i: -nbytes(entries[i])):
        place = loads.index(min(loads))
        loads[place] += max(nbytes(entries[index]), 1)
        chosen[index] = place
    return chosen
