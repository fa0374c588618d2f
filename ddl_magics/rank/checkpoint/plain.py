"""Values as JSON that come back as they were: hyperparameters, states of schedules, what a user saves beside.

What JSON has is itself. The rest that schedules and optimizers keep is an object with one key that names its kind:
tuples, dicts whose keys are no texts, Counters, numbers that JSON lacks, and small tensors. Limits: anything else
(functions, objects) is refused by name; subclasses come back as what they are subclasses of.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from typing import Any

import numpy as np
import torch

from ddl_magics.errors import CheckpointError

TUPLE, DICT, COUNTER, NUMBER, TENSOR = "(tuple)", "(dict)", "(counter)", "(number)", "(tensor)"
KINDS = (TUPLE, DICT, COUNTER, NUMBER, TENSOR)


def encode(value: Any, what: str) -> Any:
    """Turn a value into what JSON holds; `what` names it in the error where that cannot be.

    Raises
    ------
    CheckpointError
        Something in it is none of the kinds that we know.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {NUMBER: str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return {TENSOR: _from_tensor(value)}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{what}[{index}]") for index, item in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        plain = all(isinstance(key, str) for key in value) and not any(key in KINDS for key in value)
        if plain and not isinstance(value, Counter):
            return {key: encode(item, f"{what}[{key!r}]") for key, item in value.items()}
        pairs = [[encode(key, what), encode(item, f"{what}[{key!r}]")] for key, item in value.items()]
        return {COUNTER if isinstance(value, Counter) else DICT: pairs}
    message = f"{what} is a {type(value).__name__}, which a checkpoint cannot hold"
    raise CheckpointError(message, "Save numbers, texts, tensors, and lists or dicts of them.")


def decode(value: Any) -> Any:
    """Turn back what `encode` gave."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind == NUMBER:
            return float(content)
        if kind == TENSOR:
            return _to_tensor(content)
        if kind == TUPLE:
            return tuple(decode(item) for item in content)
        if kind in {DICT, COUNTER}:
            pairs = {decode(key): decode(item) for key, item in content}
            return Counter(pairs) if kind == COUNTER else pairs
    return {key: decode(item) for key, item in value.items()}


def _from_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode() if flat.numel() else ""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": data}


def _to_tensor(content: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, content["dtype"])
    data = bytearray(base64.b64decode(content["data"]))
    if not data:
        return torch.empty(content["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(content["shape"]).clone()
