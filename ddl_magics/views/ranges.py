"""Sets of ranks as people write them: `0,2-3`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def ranges(ranks: Iterable[int]) -> str:
    """`0,2-3` for {0, 2, 3}: ascending, neighbours joined, empty for no rank."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def in_words(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0,2-3`."""
    chosen = sorted(set(ranks))
    return f"{'rank' if len(chosen) == 1 else 'ranks'} {ranges(chosen)}"
