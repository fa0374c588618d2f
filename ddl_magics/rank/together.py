"""What ranks say to one another in a user's code: gather, mean, barrier, one after the other.

All are over the default process group, and collectives: every rank calls them, in the same order. Sizes and flags
travel on the CPU, so that none of these waits for a GPU on its own account. Limits: `first` waits by asking the store
twenty times a second.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddl_magics.errors import UsageOnRankError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store


def all_gather(value: Any) -> list[Any]:
    """Values of all ranks in rank order: tensors of any shapes, on this rank's device, or anything that pickles."""
    size = dist.get_world_size()
    described = _describe(value)
    descriptions: list[Any] = [None] * size
    dist.all_gather_object(descriptions, described)
    if any(description is None for description in descriptions):
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value)
        return values
    return _gather_tensors(value.detach(), [shape for shape, _ in descriptions])


def _describe(value: Any) -> tuple[tuple[int, ...], str] | None:
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else None


def _gather_tensors(value: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Gather tensors of one dtype, flat and padded to the longest: backends want equal lengths."""
    lengths = [torch.Size(shape).numel() for shape in shapes]
    padded = value.new_zeros(max(lengths))
    padded[: value.numel()] = value.reshape(-1)
    rows = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather(rows, padded)
    return [row[:length].reshape(shape) for row, length, shape in zip(rows, lengths, shapes, strict=True)]


def all_reduce_mean(value: float | torch.Tensor) -> float | torch.Tensor:
    """Mean over ranks: a number for a number, a new tensor for a tensor of the same shape on every rank."""
    if isinstance(value, torch.Tensor):
        total = value.detach().clone()
        total = total if total.is_floating_point() or total.is_complex() else total.float()
        dist.all_reduce(total)
        return total / dist.get_world_size()
    total = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def weight_in_mean(weight: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """What to multiply this rank's mean by, so that the mean over ranks weighs each rank by its `weight`.

    One all_reduce of one number, on the rank's own device: on a GPU the host does not wait for it.
    """
    size = dist.get_world_size()
    if device.type == "cpu":
        mine = float(weight)
        total = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(total)
        return mine * size / total.item() if total.item() else 0.0
    if isinstance(weight, torch.Tensor):
        own = weight.detach().to(device, torch.float64).reshape(())
    else:
        own = torch.full((), weight, dtype=torch.float64, device=device)
    sum_of_all = own.clone()
    dist.all_reduce(sum_of_all)
    return own * size / sum_of_all.clamp_min(torch.finfo(torch.float64).tiny)


def gather_for_metrics(value: Any, slice_number: int, repeated: bool) -> Any:
    """Concatenate a batch's results over ranks along dimension 0, no sample twice; same structure as `value`.

    Parameters
    ----------
    value
        A tensor with samples along dimension 0 (a 0-dim one counts as one sample), or a dict, list or tuple of such.
    slice_number
        Which slice of the global batch this rank computed; ranks with the same one computed the same samples.
    repeated
        This rank had no sample of its own and repeated another's.
    """
    if isinstance(value, dict):
        return {key: gather_for_metrics(item, slice_number, repeated) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gather_for_metrics(item, slice_number, repeated) for item in value)
    if not isinstance(value, torch.Tensor):
        raise UsageOnRankError(
            f"gather_for_metrics takes tensors, got {type(value).__name__}", "Use ddl.all_gather for other values."
        )
    value = value.detach().reshape(1) if value.dim() == 0 else value.detach()
    told = torch.tensor([slice_number, int(repeated), value.shape[0]])
    all_told = [torch.empty_like(told) for _ in range(dist.get_world_size())]
    dist.all_gather(all_told, told)
    told_by_rank = [(int(number), bool(again), int(length)) for number, again, length in all_told]
    rows = _gather_tensors(value, [(length, *value.shape[1:]) for _, _, length in told_by_rank])
    slices: dict[int, torch.Tensor] = {}
    for (number, again, _), row in zip(told_by_rank, rows, strict=True):
        if not again:
            slices.setdefault(number, row)
    return torch.cat([slices[number] for number in sorted(slices)])


def barrier() -> None:
    """Wait until every rank is here; on the host, whatever GPUs still compute."""
    dist.all_reduce(torch.zeros(1))


POLL = 0.05
"""Seconds between two questions to the store."""


@contextlib.contextmanager
def in_turn(store: Store, key: str, *, goes_first: bool, others: int) -> Iterator[None]:
    """Let one rank through before the `others`, however long it takes; no collective's time limit applies.

    Raises
    ------
    UsageOnRankError
        On the others, when the first one failed: they would wait for ever.
    """
    if goes_first:
        try:
            yield
        except BaseException as error:
            store.set(key, f"{type(error).__name__}: {error}")
            raise
        store.set(key, "")
        return
    while not store.check([key]):
        time.sleep(POLL)
    failure = store.get(key).decode()
    if store.add(f"{key}/seen", 1) == others:
        store.delete_key(key)
        store.delete_key(f"{key}/seen")
    if failure:
        raise UsageOnRankError(
            f"The rank that went first failed: {failure}", "Mend what it ran, then run the cell again."
        )
    yield
