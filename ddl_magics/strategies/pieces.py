"""Whole tensors put together on one rank from the pieces that ranks hold, and pieces read out of whole ones.

Pieces travel point to point: a broadcast or an all-reduce would cost every rank memory for the whole tensor, and time
for what nobody there asked for. A rank that has no piece goes on at once, so that tensors for several ranks are put
together at the same time. Limits: one piece of a tensor for each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.strategies.base import Whole


class Piece(NamedTuple):
    """Elements `start` to `stop` of a whole tensor, counted flat, row after row."""

    rank: int
    """Who holds them."""
    start: int
    stop: int


def takes_cpu_tensors() -> bool:
    """Whether the default group has a backend for the CPU: ours has, one of nccl alone that a program made has not."""
    return "cpu" in dist.get_backend_config()


def send(piece: torch.Tensor, to: int) -> None:
    """Send a tensor to a rank that calls `receive`.

    From the CPU where that can be: the whole is wanted there, and NCCL would open a communicator for each two ranks.
    """
    dist.send(piece.detach().to(_device(piece.device)).contiguous(), to)


def receive(into: torch.Tensor, rank: int, device: str) -> None:
    """Receive a tensor on the CPU, `into` one that is contiguous, by way of `device` where the group has only that."""
    if takes_cpu_tensors():
        dist.recv(into, rank)
        return
    arrived = torch.empty_like(into, device=device)
    dist.recv(arrived, rank)
    into.copy_(arrived)


def _device(own: torch.device) -> torch.device:
    return torch.device("cpu") if takes_cpu_tensors() else own


def collect(
    pieces: Sequence[Piece], mine: torch.Tensor, *, numel: int, rank: int, to: int, device: str
) -> torch.Tensor | None:
    """Flat tensor of `numel` elements on the CPU of rank `to`, None on the others.

    `mine`: the piece of this rank, flat, or an empty tensor of the same dtype where it has none.
    """
    if rank != to:
        if any(piece.rank == rank for piece in pieces):
            send(mine, to)
        return None
    whole = torch.empty(numel, dtype=mine.dtype)
    for piece in pieces:
        part = whole[piece.start : piece.stop]
        if piece.rank == rank:
            part.copy_(mine.detach())
        else:
            receive(part, piece.rank, device)
    return whole


def read(whole: Whole, start: int, stop: int, rows: slice = slice(None), columns: slice = slice(None)) -> torch.Tensor:
    """Elements `start` to `stop`, counted flat, of a whole tensor or of a block of a matrix; reads full rows only.

    `rows`, `columns`: the block, with both ends given; all of it by default.
    """
    shape = tuple(whole.shape)
    if len(shape) < 2:
        first = rows.start or 0
        values = whole[first + start : first + stop] if shape else whole[...]
        return values.reshape(-1)
    width = torch.Size(shape[1:]).numel() if columns.stop is None else columns.stop - columns.start
    if start == stop:
        return whole[0:0].reshape(-1)
    top, bottom = start // width, -(-stop // width)
    first = rows.start or 0
    picked = slice(first + top, first + bottom)
    values = whole[picked] if columns.stop is None else whole[picked, columns]
    return values.reshape(-1)[start - top * width : stop - top * width]
