"""What makes a folder of weights one that Hugging Face's `from_pretrained` reads: configuration and tokenizer.

Written by one rank, in the library's own words. Limits: code of models that are not in the library is not copied.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from ddl_magics.strategies.base import Entry


def write(
    folder: Path, module: torch.nn.Module, weights: list[Entry], tokenizer: Any, note: Callable[[str], object]
) -> None:
    """Write config.json, generation_config.json and the tokenizer's files, as far as there are such."""
    config: Any = copy.deepcopy(getattr(module, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [own_class(module).__name__]
        dtype = next((entry.dtype for entry in weights if entry.dtype.is_floating_point), None)
        if dtype is not None:
            # Its name before transformers 4.56 was another.
            setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(dtype).removeprefix("torch."))
        config.save_pretrained(folder)
    generation: Any = getattr(module, "generation_config", None)
    if generation is not None:
        try:
            generation.save_pretrained(folder)
        except ValueError as error:  # the library refuses to write what it would refuse to use
            note(f"The generation config was not saved: {error}")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def own_class(module: torch.nn.Module) -> type:
    """The class that the user knows: some strategies put one of torch's over it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))
