"""What this rank tells about variables, so that the notebook can say whether all ranks hold the same.

The notebook asks in rounds, each answered from this rank's own memory in its main thread, without a collective:
`survey` (a digest or a few for each name), and only where those differ `details` (a digest for each tensor), `chunks`
(where in a tensor) and `values` (the numbers there). So ranks that agree send some hundred bytes.
Wire types are dicts and tuples of plain values.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from ddl_magics.rank import digest
from ddl_magics.rank.engine import this_kernel
from ddl_magics.rank.leaves import NAMED, Leaf, Walk, random_states
from ddl_magics.rank.model import training_of
from ddl_magics.rank.shards import Shards

if TYPE_CHECKING:
    from collections.abc import Iterator

RANDOM = "rng"
"""Stands for the random states, where no variable is called so."""
SHOWN = 60
"""Characters of a plain value that are sent to be shown."""

_told: dict[str, list[dict[str, Any]]] = {}
"""What the last survey found, for `details`: digests and words, no tensors."""


def survey(names: list[str]) -> list[dict[str, Any]]:
    """For each expression: `head` (what it is), `digests` by shard key, counts and bytes; or `missing`, or `error`.

    Raises nothing of the user's: an expression that fails is told as `error`, one line.
    """
    _told.clear()
    return [_surveyed(name) for name in names]


def _surveyed(name: str) -> dict[str, Any]:
    try:
        value, leaves = _leaves(name)
        found = [_described(leaf) for leaf in leaves]
    except NameError as error:
        return {"missing": error.name == name, "error": f"NameError: {error}"}
    except Exception as error:  # noqa: BLE001 - the user's expression and objects raise whatever they like
        said = next(iter(str(error).strip().splitlines()), "")
        return {"missing": False, "error": f"{type(error).__name__}: {said}" if said else type(error).__name__}
    _told[name] = found
    by_key: dict[str, Any] = {}
    for leaf in found:
        mixed = by_key.setdefault(leaf["key"], hashlib.blake2b(digest_size=digest.DIGEST))
        mixed.update(f"{leaf['path']}\0{leaf['what']}\0{leaf['digest']}\n".encode())
    return {
        "head": _head(value, found),
        "text": found[0]["text"] if len(found) == 1 and not found[0]["path"] else "",
        "digests": {key: mixed.hexdigest() for key, mixed in by_key.items()},
        "sharded": sum(bool(leaf["key"]) for leaf in found),
        "leaves": len(found),
        "tensors": sum(bool(leaf["nbytes"]) for leaf in found),
        "nbytes": sum(leaf["nbytes"] for leaf in found),
        "vague": sum(leaf["vague"] for leaf in found),
    }


def details(name: str) -> list[dict[str, Any]]:
    """Each leaf that the last survey found under a name: `path`, `kind`, `what`, `key`, `digest`, `text`."""
    return _told.get(name, [])


def chunks(name: str, path: str) -> list[bytes]:
    """Digests of the pieces of one tensor; empty where it is not there or is no tensor."""
    tensor = _find(name, path)
    return [] if tensor is None else digest.chunks(tensor)


def values(name: str, path: str, numbers: list[int]) -> list[list[float]]:
    """The numbers in some pieces of one tensor."""
    tensor = _find(name, path)
    return [] if tensor is None else [digest.values(tensor, number) for number in numbers]


def _leaves(name: str) -> tuple[Any, Iterator[Leaf]]:
    """The value of an expression in the user's namespace, which it leaves as it is, and the leaves of that value."""
    kernel = this_kernel()
    namespace, context = kernel.shell.user_ns, kernel.runner.context
    if name == RANDOM and name not in namespace:
        return None, random_states()
    value = eval(name, namespace, {})  # noqa: S307 - the user's own words, on the user's own ranks
    return value, Walk(Shards(context.world.rank, context.prepared_models())).leaves(value)


def _find(name: str, path: str) -> torch.Tensor | None:
    leaf = next((leaf for leaf in _leaves(name)[1] if leaf.path == path), None)
    return leaf.value if leaf is not None and isinstance(leaf.value, torch.Tensor) else None


def _described(leaf: Leaf) -> dict[str, Any]:
    value, what, text, vague, nbytes = leaf.value, type(leaf.value).__name__, "", False, 0
    if isinstance(value, torch.Tensor):
        what, mark, text, nbytes = _of_tensor(leaf, value)
    elif value is None and leaf.shape:
        what, mark = "nothing of it is here", ""
    elif isinstance(value, NAMED):
        text = ".".join(filter(None, [getattr(value, "__module__", None), value.__name__]))
        mark = digest.of_text(text + _code(value))
    else:
        mark, exact = digest.of_value(value)
        text, vague = _short(value) if exact else "", not exact
    return {"path": leaf.path, "kind": leaf.kind, "key": leaf.key, "what": what, "digest": mark, "text": text,
            "vague": vague, "nbytes": nbytes}  # fmt: skip


def _of_tensor(leaf: Leaf, tensor: torch.Tensor) -> tuple[str, str, str, int]:
    """What a tensor is, its digest, its value where it is a single number, and the bytes that can be looked into."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    what = f"{dtype} {list(leaf.shape)}" + ("" if leaf.numpy else f" {_device(tensor)}")
    if tensor.layout != torch.strided:
        return f"{what} {str(tensor.layout).removeprefix('torch.')}", _of_parts(tensor), "", 0
    if tensor.is_meta or (tensor.numel() and not tensor.untyped_storage().nbytes()):
        return f"{what} without storage", "", "", 0
    if tensor.is_quantized:
        return what, digest.of_tensor(tensor.int_repr()), "", 0
    text = _number(tensor.item()) if tensor.numel() == 1 and not leaf.key else ""
    return what, digest.of_tensor(tensor), text, tensor.nbytes


def _of_parts(tensor: torch.Tensor) -> str:
    """Digest of a sparse tensor: of its indices and values as they stand."""
    inner = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        pieces = [inner._indices(), inner._values()]  # noqa: SLF001 - `indices()` refuses what is not coalesced
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        pieces = [inner.crow_indices(), inner.col_indices(), inner.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        pieces = [inner.ccol_indices(), inner.row_indices(), inner.values()]
    else:
        pieces = [inner.to_dense()]
    return digest.of_text("".join(digest.of_tensor(piece) for piece in pieces))


def _device(tensor: torch.Tensor) -> str:
    """`cuda` for this rank's own GPU, whatever its number, which differs by rank; another one by its full name."""
    if tensor.device.type == "cuda" and torch.cuda.is_initialized() and (  # type: ignore[no-untyped-call]
        tensor.device.index == torch.cuda.current_device()
    ):  # fmt: skip
        return "cuda"
    return str(tensor.device)


def _code(thing: Any) -> str:
    code = getattr(thing, "__code__", None)
    return repr((code.co_code, code.co_names, len(code.co_consts))) if code else ""


def _short(value: Any) -> str:
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _number(x: complex) -> str:
    """Nine digits tell numbers of 32 bits apart."""
    if isinstance(x, complex | int) or not math.isfinite(x):
        return str(x)
    return f"{x:.9g}"


def _head(value: Any, found: list[dict[str, Any]]) -> str:
    """What a value is, in a few words that are the same for equal values."""
    training = training_of(value)
    if training is not None:
        value = training.prepared.module
    kind = type(value).__name__
    if isinstance(value, torch.nn.Module):
        counts = [(sum(leaf["kind"] == word for leaf in found), word) for word in ("parameter", "buffer")]
        said = [f"{n} {word}{'s' if n > 1 else ''}" for n, word in counts if n]
        return ", ".join([f"{kind} under {training.prepared.strategy.spec.text}" if training else kind, *said])
    if found[0]["kind"] == "random state":
        return "random states"
    if isinstance(value, DataLoader | Dataset):
        return str(found[0]["text"])
    if isinstance(value, dict | list | tuple | set | frozenset):
        return f"{kind} of {len(value)}"
    only = found[0] if len(found) == 1 and not found[0]["path"] else None
    tensor = only and only["what"] != kind and not isinstance(value, torch.Generator)
    return str(only["what"]) if only and tensor else kind
