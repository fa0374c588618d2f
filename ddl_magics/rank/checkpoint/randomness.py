"""The random state of a rank, and how a rank that was not there when it was saved gets one.

Of Python, NumPy, torch's CPU generator and that of the rank's GPU where it was started. Limits: generators that a
program made for itself are its own; a GPU's state means nothing to a CPU and is left out there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from typing import Any

import numpy as np
import torch

from ddl_magics.rank.batches import random_state, seed_all, set_random_state

State = dict[str, Any]
"""As JSON holds it."""


def take() -> State:
    """The random state of this rank now."""
    python, numpy, cpu = random_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return {
        "python": [python[0], _pack(np.array(python[1], dtype=np.uint64)), python[2]],
        "numpy": [numpy[0], _pack(numpy[1]), *numpy[2:]],
        "torch": _pack(cpu.numpy()),
        "cuda": None if cuda is None else _pack(cuda.numpy()),
    }


def give(states: list[State], rank: int) -> None:
    """Give this rank the state that it had; a rank that is new gets one made from rank 0's and its own number."""
    if rank >= len(states):
        text = json.dumps([states[0], rank])
        seed_all(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))
        return
    state = states[rank]
    version, words, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    python = version, tuple(int(word) for word in _unpack(words, np.uint64)), gauss
    numpy = (name, _unpack(keys, np.uint32), *rest)
    set_random_state((python, numpy, torch.from_numpy(_unpack(state["torch"], np.uint8))))
    if state["cuda"] is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(torch.from_numpy(_unpack(state["cuda"], np.uint8)))


def _pack(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes(), 1)).decode()


def _unpack(text: str, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=dtype).copy()
