"""Variables between the notebook and this rank, as cloudpickle bytes; tensors travel on the CPU."""

from __future__ import annotations

import io
from typing import Any

import cloudpickle
import torch

from ddl_magics.errors import TransferError
from ddl_magics.rank.engine import this_kernel


class _CpuPickler(cloudpickle.Pickler):
    """Pickles tensors as they are on the CPU, and of a view only what it shows, not the storage behind it."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and type(obj) in (torch.Tensor, torch.nn.Parameter):
            plain = obj.detach().cpu()
            if plain.layout == torch.strided and plain.untyped_storage().nbytes() > plain.nbytes:
                plain = plain.clone()
            if type(obj) is torch.nn.Parameter:
                plain = torch.nn.Parameter(plain, requires_grad=obj.requires_grad)
            return plain.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)


def pickled(name: str, value: object) -> bytes:
    """Bytes of a value. Raises TransferError naming the variable and why."""
    buffer = io.BytesIO()
    try:
        _CpuPickler(buffer).dump(value)
    except Exception as error:
        msg = f"{name!r} ({type(value).__name__}) cannot be sent: {error}"
        raise TransferError(msg) from error
    return buffer.getvalue()


def push(blobs: dict[str, bytes]) -> None:
    """Set variables of this rank. Raises TransferError for what cannot be read here."""
    values = {}
    for name, blob in blobs.items():
        try:
            values[name] = cloudpickle.loads(blob)
        except Exception as error:
            msg = f"{name!r} cannot be read on the rank: {type(error).__name__}: {error}"
            raise TransferError(msg, "Install or define there what it is made of") from error
    this_kernel().shell.user_ns.update(values)


def pull(names: list[str]) -> dict[str, bytes]:
    """Variables of this rank. Raises TransferError for a name that is not there or cannot be pickled."""
    namespace = this_kernel().shell.user_ns
    missing = [name for name in names if name not in namespace]
    if missing:
        msg = f"there is no variable {', '.join(map(repr, missing))}"
        raise TransferError(msg, "Cells make variables on the ranks: run the one that does")
    return {name: pickled(name, namespace[name]) for name in names}


def result(cell: int) -> bytes:
    """Value of the last expression of a cell, None where it had none."""
    return pickled("the cell's result", this_kernel().shell.user_ns["Out"].get(cell))
