"""Where DeepSpeed holds the share of each parameter that this rank's optimizer updates, and what lies beside it.

Written against DeepSpeed 0.19; the names read here are those of `runtime/zero/stage_1_and_2.py` and `stage3.py`.
DeepSpeed's public `safe_get_full_optimizer_state` and `safe_get_full_fp32_param` would gather these too, by an
all-reduce of a whole tensor of zeros on every rank for each; with the layout known, each rank sends its piece alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies import zero_library
from ddl_magics.strategies.pieces import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@dataclass(frozen=True)
class Home:
    """Where one parameter is in the flat tensors of its group: the masters, and state shaped as they are."""

    number: int
    """Of DeepSpeed's group; in stage 3 a group of the user's may be several."""
    pieces: tuple[Piece, ...]
    """Who has which of its elements."""
    at: int
    """Where this rank's piece begins in this rank's flat tensors."""
    mine: Piece
    """Piece of this rank, possibly without an element."""

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """Piece of this rank, a view of a flat tensor of the parameter's group."""
        return flat[self.at : self.at + self.mine.stop - self.mine.start]


def require_in_memory(optimizer: Any) -> None:
    """Raise UsageOnRankError where a user's configuration keeps the optimizer's state or the weights in files."""
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        raise UsageOnRankError(
            "DeepSpeed keeps tensors of this model on NVMe, and a checkpoint takes them from memory",
            "Offload to the cpu instead, or save with the DeepSpeed engine's own save_checkpoint.",
        )


def homes(optimizer: Any) -> dict[int, Home]:
    """Identity of each parameter that a DeepSpeed optimizer updates -> where it is."""
    require_in_memory(optimizer)
    if zero_library.is_stage_3(optimizer):
        return dict(_of_shards(optimizer))
    return dict(_of_partitions(optimizer))


def _of_partitions(optimizer: Any) -> Iterator[tuple[int, Home]]:
    """Stages 1 and 2: the weights of a group are views of one flat tensor, of which each rank updates an equal part."""
    for number, (group, flat) in enumerate(zip(optimizer.bit16_groups, optimizer.bit16_groups_flat, strict=True)):
        size, rank = int(optimizer.partition_size[number]), dist.get_rank(optimizer.real_dp_process_group[number])
        for parameter in group:
            first = parameter.storage_offset() - flat.storage_offset()
            yield id(parameter), place(number, first, parameter.numel(), size, rank)


def place(number: int, first: int, numel: int, size: int, rank: int) -> Home:
    """`first`: where the parameter begins in the flat tensor, of which each rank has `size` elements."""
    last = first + numel
    ranks = range(first // size, -(-last // size))
    pieces = tuple(Piece(r, max(first, r * size) - first, min(last, (r + 1) * size) - first) for r in ranks)
    mine = next((piece for piece in pieces if piece.rank == rank), Piece(rank, 0, 0))
    return Home(number, pieces, max(0, first - rank * size) if mine.stop else 0, mine)


def _of_shards(optimizer: Any) -> Iterator[tuple[int, Home]]:
    """Stage 3: each parameter is cut into equal shards, and a rank's shards of a group lie side by side."""
    for number, group in enumerate(optimizer.fp16_groups):
        at = 0
        for parameter in group:
            pieces, mine = shards(parameter)
            yield id(parameter), Home(number, pieces, at, mine)
            at += parameter.partition_numel()


def shards(parameter: Any) -> tuple[tuple[Piece, ...], Piece]:
    """Who has which elements of a sharded parameter (stage 3), the padding of the last ones left out; and this rank."""
    size, numel = parameter.partition_numel(), parameter.ds_numel
    pieces = tuple(
        Piece(rank, rank * size, min(numel, (rank + 1) * size)) for rank in range(-(-numel // size)) if numel
    )
    rank = dist.get_rank(parameter.ds_process_group)
    return pieces, next((piece for piece in pieces if piece.rank == rank), Piece(rank, 0, 0))


def group_of(optimizer: Any, number: int) -> int:
    """Which of the user's groups a group of DeepSpeed's is of."""
    return int(optimizer.sub_group_to_group_id[number]) if zero_library.is_stage_3(optimizer) else number
