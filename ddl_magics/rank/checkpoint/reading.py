"""`ddl.load`: find the checkpoint, see that it is whole and fits, and only then change anything.

Each rank reads what it holds, from files that all see. Limits: tensors that a strategy must gather to place are read
whole; an interrupt, or a disk that dies, while the tensors are being placed leaves a model of which some weights are
loaded. It is marked as such on every rank, is refused by every call that would use it, and is whole after another load.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import CheckpointError
from ddl_magics.rank.checkpoint import fit, layout, plain, record, states, tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.rank.checkpoint.talk import Talk
    from ddl_magics.rank.training import Training
    from ddl_magics.strategies.base import Entry, Whole

RESUME = ("latest",)
WEIGHT, MASTER = "weight", "master"


@dataclass(frozen=True)
class Loaded:
    """What `ddl.load` tells."""

    folder: Path | None = None
    """Where it was loaded from; None: there was no checkpoint yet (`resume="latest"`)."""
    step: int = 0
    """Optimizer steps that the model has behind it."""
    epoch: int = 0
    """Epochs that were trained to their end."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What was given to `ddl.save` by name."""


def load(training: Training, talk: Talk, path: Any, resume: Any, note: Callable[[str], object]) -> Loaded:
    """Load into a prepared model; a collective.

    Raises
    ------
    CheckpointError
        There is no checkpoint, it is damaged, or does not fit; the same on all ranks, and nothing was changed.
    """
    paths = talk.do(lambda: _checked(path, resume))
    require_same(paths, "load(path)")
    found = talk.of_first(lambda: _find(Path(paths[0]), resume))
    if found is None:
        return Loaded()
    folder = Path(found)
    saved = _read_record(folder, talk)
    if saved is not None:
        talk.do(lambda: fit.verify(folder, saved, talk.rank, talk.size))
    items: list[tuple[Entry, Whole]] = []
    before = training.half_loaded
    training.half_loaded = True  # here already: a rank that is interrupted now is left by others that go on
    try:
        talk.do(lambda: items.extend(_fitting(folder, saved, training)))
    except CheckpointError:
        training.half_loaded = before
        raise
    loaded = _give(folder, saved, items, training, talk.rank, note)
    talk.hear(None)  # it counts when it came to its end everywhere
    training.half_loaded = False
    return loaded


def _give(
    folder: Path,
    saved: record.Record | None,
    items: list[tuple[Entry, Whole]],
    training: Training,
    rank: int,
    note: Callable[[str], object],
) -> Loaded:
    """Change the model, and all that belongs to it."""
    if saved is not None:
        training.prepared.resume_at(saved["step"])
    for sentence in training.prepared.put(items):
        note(sentence)
    if saved is None:
        note(f"{folder} holds weights and nothing else: optimizer and step are as they were.")
        return Loaded(folder, training.steps)
    record.give(saved, training, rank, note)
    return Loaded(folder, saved["step"], record.epoch(saved), plain.decode(saved["extra"]))


def _checked(path: Any, resume: Any) -> str:
    if resume is not None and resume not in RESUME:
        raise CheckpointError(f"There is no resume={resume!r}", f"Valid: {', '.join(map(repr, RESUME))}.")
    return folder_of(path, "load")


def folder_of(path: Any, call: str) -> str:
    """The absolute path that a user names; `call` is which call it was given to."""
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"{call}(path) takes a folder, got a {type(path).__name__}", "Give its path.")
    return str(Path(path).expanduser().absolute())


def require_same(values: list[Any], what: str) -> None:
    """Raise on all ranks, in the same words, where they were given different things."""
    for rank, value in enumerate(values):
        if value != values[0]:
            message = f"{what} is {value} on rank {rank} and {values[0]} on rank 0"
            raise CheckpointError(message, "Give all ranks the same.")


def _find(path: Path, resume: str | None) -> str | None:
    """The folder to read, on rank 0; None where it is no fault that there is none."""
    if (path / layout.RECORD).is_file():
        return str(path)
    latest = layout.Run(path).latest() if path.is_dir() else None
    if latest is not None or resume is not None:
        return None if latest is None else str(latest)
    if not path.is_dir():
        raise CheckpointError(f"There is no folder {path}", "Give the one that ddl.save was given, or returned.")
    if tensors.weight_paths(path):
        return str(path)
    message = f"{path} holds no checkpoint"
    if any(path.glob("*.bin")):
        raise CheckpointError(f"{message} and no safetensors", "Save it with save_pretrained of transformers.")
    raise CheckpointError(message, "Give the folder that ddl.save was given, or one with model.safetensors.")


def _read_record(folder: Path, talk: Talk) -> record.Record | None:
    """What else the checkpoint holds, None for a plain folder of weights; all ranks must see the same."""

    def read() -> tuple[str, record.Record | None]:
        if not folder.is_dir():
            message = f"Rank {talk.rank} ({layout.host()}) does not see {folder}"
            raise CheckpointError(message, "Put it where all nodes see it.")
        path = folder / layout.RECORD
        if not path.is_file():
            return "", None
        return hashlib.sha256(path.read_bytes()).hexdigest(), layout.record(folder)

    own: list[record.Record | None] = []

    def digest() -> str:
        found, content = read()
        own.append(content)
        return found

    require_same(talk.do(digest), f"The digest of {folder / layout.RECORD}")
    return own[0]


def _fitting(folder: Path, saved: record.Record | None, training: Training) -> list[tuple[Entry, Whole]]:
    """What to put into the model: weights, masters, states. CheckpointError where anything does not fit."""
    prepared = training.prepared
    weights = [entry for entry in prepared.entries() if entry.kind == WEIGHT]
    found = tensors.read_folder(folder)
    items = fit.match(prepared.module, weights, found, training.name, folder)
    if saved is None:
        return items
    record.check(saved, training)
    kept: list[tuple[Entry, Whole]] = [*states.read_folder(folder / layout.OPTIMIZER, saved["states"])]
    masters = [item for item in kept if item[0].kind == MASTER]
    if prepared.optimizer is None:
        return [*items, *masters]
    return [*items, *masters, *(item for item in kept if item[0].kind != MASTER)]
