"""Adapters of the package peft by themselves: saved and loaded without the model that they adapt.

The folder is Hugging Face's: `adapter_config.json` and `adapter_model.safetensors`, which `PeftModel.from_pretrained`
reads. Which weights belong to an adapter and what they are called there is asked of peft, with stand-ins that hold
nothing, so that only these weights are gathered. Limits: methods whose file is computed and not copied from the
model's weights are refused; an adapter is small, so every rank reads the whole file.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.errors import CheckpointError, UsageOnRankError
from ddl_magics.rank.checkpoint.reading import folder_of, require_same

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.rank.checkpoint.talk import Talk
    from ddl_magics.rank.training import Training
    from ddl_magics.strategies.base import Entry

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SCALING = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""What in a configuration says how the weights act, and must be the same where they go."""


def save(training: Training, talk: Talk, path: Any, adapter: str) -> Path:
    """Save one adapter of a prepared model; a collective. Returns the folder.

    Raises
    ------
    UsageOnRankError
        The model has no such adapter.
    CheckpointError
        It cannot be written there; what was there is as it was.
    """
    paths = talk.do(lambda: folder_of(path, "save_adapter"))
    require_same(paths, "save_adapter(path)")
    folder = Path(paths[0])
    entries = _entries_of(training, talk, adapter)
    held = {name: training.prepared.gather(entry, to=0) for name, entry in entries.items()}
    config = training.prepared.module.peft_config[adapter]  # type: ignore[index]
    talk.of_first(lambda: _write(folder, held, config, training))
    return folder


def load(training: Training, talk: Talk, path: Any, adapter: str) -> tuple[str, ...]:
    """Load an adapter's weights into the adapter that a prepared model has; a collective.

    Returns sentences for the user. Raises as `save`, and CheckpointError where the file is missing or of another
    adapter; nothing was changed then.
    """
    paths = talk.do(lambda: folder_of(path, "load_adapter"))
    require_same(paths, "load_adapter(path)")
    entries = _entries_of(training, talk, adapter)
    items: list[tuple[Entry, torch.Tensor]] = []
    talk.do(lambda: items.extend(_read(Path(paths[0]), entries, training, adapter)))
    return training.prepared.put(items)


def _entries_of(training: Training, talk: Talk, adapter: str) -> dict[str, Entry]:
    """Weights of an adapter by their names in its file; rank 0 asks peft, which may look at the base model's files."""
    own = {entry.name: entry for entry in training.prepared.entries() if entry.kind == "weight"}
    names = talk.of_first(lambda: _names_in_file(training.prepared.module, list(own.values()), adapter))
    return {in_file: own[name] for in_file, name in names.items()}


def _names_in_file(module: Any, entries: list[Entry], adapter: str) -> dict[str, str]:
    """Name of each weight of an adapter in its file -> its name in the model."""
    known = getattr(module, "peft_config", None)
    if not isinstance(known, dict):
        kind = type(module).__name__
        raise UsageOnRankError(f"This {kind} has no adapter", "Make it by peft.get_peft_model before ddl.prepare.")
    if adapter not in known:
        raise UsageOnRankError(f"There is no adapter {adapter!r}", f"Valid: {', '.join(map(repr, known))}.")
    from peft import get_peft_model_state_dict

    stand_ins = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries}
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it guesses whether embeddings belong to the adapter, and says what it guessed
        found = get_peft_model_state_dict(module, state_dict=stand_ins, adapter_name=adapter)
    computed = [name for name, tensor in found.items() if id(tensor) not in names]
    if computed or not found:
        kind = getattr(known[adapter].peft_type, "value", known[adapter].peft_type)
        what = f"{computed[0]} is computed from the weights" if computed else "it has no weights of its own"
        raise UsageOnRankError(
            f"An adapter of the kind {kind} cannot be saved by itself: {what}",
            "Save ddl.full_state_dict(model) instead.",
        )
    return {in_file: names[id(tensor)] for in_file, tensor in found.items()}


def _write(folder: Path, weights: dict[str, Any], config: Any, training: Training) -> None:
    """Weights first, then the configuration that makes the folder an adapter's, each whole under its name."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(config)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        base = training.prepared.module.get_base_model()  # type: ignore[operator]
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    draft = folder / f".{WEIGHTS}"
    _put(folder / WEIGHTS, draft, lambda: save_file(weights, draft, metadata={"format": "pt"}))
    values = {name: _plain(value) for name, value in config.to_dict().items()}
    text = json.dumps(values, indent=2, sort_keys=True)
    draft = folder / f".{CONFIG}"
    _put(folder / CONFIG, draft, lambda: draft.write_text(text))


def _put(path: Path, draft: Path, write: Callable[[], object]) -> None:
    try:
        write()
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """A value of a configuration as JSON has it."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return getattr(value, "value", value)


def _read(
    folder: Path, entries: dict[str, Entry], training: Training, adapter: str
) -> list[tuple[Entry, torch.Tensor]]:
    """Weights of a folder with the entries that they are for."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"There is no adapter in {folder}", "Give the folder that ddl.save_adapter returned.")
    try:
        found = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read: {error}", "Save it again.") from error
    faults = [
        *(f"{name} is missing in it" for name in entries if name not in found),
        *(f"{name} is unknown here" for name in found if name not in entries),
        *(
            f"{name} has the shape {tuple(found[name].shape)}, here {tuple(entry.shape)}"
            for name, entry in entries.items()
            if name in found and tuple(found[name].shape) != tuple(entry.shape)
        ),
        *_other_scaling(folder, training.prepared.module, adapter),
    ]
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        message = f"{folder} holds another adapter: {faults[0]}{more}"
        raise CheckpointError(message, "Make the adapter as it was when it was saved.")
    return [(entry, found[name]) for name, entry in entries.items()]


def _other_scaling(folder: Path, module: Any, adapter: str) -> list[str]:
    """Settings in which the saved adapter differs from the one that is here, where the folder tells them."""
    if not (folder / CONFIG).is_file():
        return []
    saved = json.loads((folder / CONFIG).read_text())
    own = {name: _plain(value) for name, value in module.peft_config[adapter].to_dict().items()}
    return [f"{key} is {saved[key]!r}, here {own[key]!r}"
            for key in SCALING if key in saved and key in own and saved[key] != own[key]]  # fmt: skip
