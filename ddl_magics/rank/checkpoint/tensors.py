"""Weights in safetensors files, written one tensor after the other as they come, and read in slices.

The format is 8 bytes with the length of a header, the header (JSON: dtype, shape and place of each tensor), and the
tensors' bytes (https://huggingface.co/docs/safetensors). The library wants all tensors of a file at once, which is as
much memory as the file; here the header is known before, since entries tell shapes and dtypes. Reading is the
library's. Limits: little-endian machines, as the format.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.errors import CheckpointError
from ddl_magics.rank.checkpoint.files import Draft
from ddl_magics.rank.checkpoint.shares import nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddl_magics.strategies.base import Entry, Whole

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
"""Torch's dtypes by the format's names for them."""
OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
INDEX = "model.safetensors.index.json"
"""Where Hugging Face looks up which file has which weight, when there are several."""


class WeightsDraft:
    """One safetensors file that is being written; tensors come in any order of the dtypes' sizes, largest first."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.entries = in_order(entries)
        self._draft = Draft(path)
        self._next = 0
        try:
            self._draft.write(header(self.entries))
        except BaseException:  # an interrupt too
            self._draft.abandon()
            raise

    def add(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Write the next tensor, one of those that `in_order` gives, in that order."""
        assert entry == self.entries[self._next]
        self._next += 1
        self._draft.write(raw(tensor))

    def finish(self) -> dict[str, int | str]:
        """See `Draft.finish`."""
        return self._draft.finish()

    def abandon(self) -> None:
        """See `Draft.abandon`."""
        self._draft.abandon()


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """As they stand in a file: those of wide dtypes first, so that each begins at a multiple of its own width."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def header(entries: Sequence[Entry]) -> bytes:
    """Beginning of a file with these tensors, padded so that they begin at a multiple of 8 bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers does not know whose it is
    offset = 0
    for entry in entries:
        end = offset + nbytes(entry)
        table[entry.name] = {
            "dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw(tensor: torch.Tensor) -> memoryview:
    """Bytes of a tensor on the CPU, row after row."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def index(names: dict[str, str], total: int) -> str:
    """Content of `INDEX`: the file of each weight, and bytes of all weights."""
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}, indent=2)


def read_folder(folder: Path) -> dict[str, Whole]:
    """Weights of a folder by name, each read as far as somebody asks.

    Raises
    ------
    CheckpointError
        There is none, or a file is none of safetensors.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, Whole] = {}
    for path in weight_paths(folder):
        try:
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - no dict
                found[name] = Slices(file.get_slice(name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", "Load another checkpoint.") from error
    return found


def weight_paths(folder: Path) -> list[Path]:
    """The files that hold the weights of a folder; none where it has none of this format."""
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


class Slices:
    """A tensor in a safetensors file."""

    def __init__(self, found: Any) -> None:
        self._found = found
        self.shape = tuple(found.get_shape())
        name = found.get_dtype()
        if name not in OF_NAME:
            message = f"A weight has the dtype {name}, which is not known here"
            raise CheckpointError(message, "Update ddl-magics.")
        self.dtype = OF_NAME[name]

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._found[index]
        return part
