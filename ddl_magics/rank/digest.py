"""Fingerprints of tensors and plain values, by which ranks compare what they hold without sending it.

A tensor is read in the order of its elements, whatever its strides and wherever it is, piece by piece: no second copy
of it is made, and only one piece of a CUDA tensor is on the host at a time. Each piece has a digest and
the tensor the digest of those, so that two ranks also find where they differ. Equal means equal bits: NaN equals a NaN
of the same bits, and 0.0 differs from -0.0. Digests are BLAKE2b's, of 16 bytes. Nothing here is a collective.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 256 * 1024
"""Bytes of a piece. A multiple of the size of every element, so that equal places of equal tensors are in the same."""
READ = 64 * CHUNK
"""Bytes that are brought to the host, or made contiguous, at a time."""
DIGEST = 16
"""Bytes of a digest."""

ADDRESS = re.compile(r" at 0x[0-9a-f]{6,16}\b")
"""Part of a default repr that differs between processes."""


def of_tensor(tensor: torch.Tensor) -> str:
    """Digest of a tensor's elements. Its shape and type are not in it."""
    return of_chunks(chunks(tensor))


def of_chunks(digests: list[bytes]) -> str:
    """Digest of a tensor by those of its pieces."""
    return hashlib.blake2b(b"".join(digests), digest_size=DIGEST).hexdigest()


def chunks(tensor: torch.Tensor) -> list[bytes]:
    """Digests of a tensor's pieces, in order."""
    digests, room, current = [], CHUNK, hashlib.blake2b(digest_size=DIGEST)
    for data in _bytes(tensor):
        view = memoryview(data).cast("B")
        while len(view):
            current.update(view[:room])
            taken = min(room, len(view))
            view, room = view[taken:], room - taken
            if room == 0:
                digests.append(current.digest())
                room, current = CHUNK, hashlib.blake2b(digest_size=DIGEST)
    return [*digests, current.digest()] if room < CHUNK else digests


def values(tensor: torch.Tensor, chunk: int) -> list[float]:
    """The elements of one piece as numbers, integers as such, exactly; a complex element is two."""
    size = CHUNK // tensor.element_size()
    flat = _flat_slice(tensor, chunk * size, (chunk + 1) * size)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if not flat.is_floating_point() and flat.dtype != torch.bool:
        return flat.to("cpu").tolist()
    return flat.to("cpu", torch.float64).tolist()


def _flat_slice(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Elements `first` to `last` in order, `[n]`."""
    tensor = tensor.detach()
    if tensor.is_contiguous() or tensor.nbytes <= READ:
        return tensor.reshape(-1)[first:last]
    position, parts = 0, []
    for piece in _pieces(tensor):
        start, stop = max(first - position, 0), min(last - position, piece.numel())
        if start < stop:
            parts.append(piece[start:stop])
        position += piece.numel()
    return torch.cat(parts) if parts else tensor.new_empty(0)


def _bytes(tensor: torch.Tensor) -> Iterator[Any]:
    """The tensor's bytes in the order of its elements, as buffers on the host."""
    for piece in _pieces(tensor.detach()):
        whole = piece.resolve_conj().resolve_neg()
        here = whole.to("cpu").contiguous()
        yield (ctypes.c_ubyte * here.nbytes).from_address(here.data_ptr())  # read before `here` goes


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous flat parts of a tensor, in the order of its elements; each at most READ bytes."""
    size = READ // tensor.element_size()
    if tensor.is_contiguous() or tensor.nbytes <= READ:
        yield from torch.split(tensor.reshape(-1), size) if tensor.numel() else ()
    elif tensor[0].nbytes <= READ:
        for rows in torch.split(tensor, max(1, READ // max(1, tensor[0].nbytes))):
            yield rows.reshape(-1)
    else:
        for row in tensor.unbind(0):
            yield from _pieces(row)


def of_text(text: str) -> str:
    """Digest of a text."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=DIGEST).hexdigest()


def of_value(value: Any) -> tuple[str, bool]:
    """Digest of anything else, and whether it tells values apart; where it does not, it is of the type alone.

    By its pickle, and where it has none by its repr, if that says more than the type.
    """
    try:
        return hashlib.blake2b(pickle.dumps(value, protocol=4), digest_size=DIGEST).hexdigest(), True
    except Exception:  # noqa: BLE001 - objects raise whatever they like when they refuse to be pickled
        text = repr(value)
    said = ADDRESS.sub("", text)
    return of_text(said), said == text
