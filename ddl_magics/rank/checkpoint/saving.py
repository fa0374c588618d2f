"""`ddl.save`: what is saved of a model in training, agreed on by all ranks before the first byte is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import CheckpointError
from ddl_magics.rank.checkpoint import beside, layout, record
from ddl_magics.rank.checkpoint.reading import folder_of, require_same
from ddl_magics.rank.checkpoint.writing import WEIGHT, Writing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.rank.checkpoint.talk import Talk
    from ddl_magics.rank.training import Training
    from ddl_magics.strategies.base import Entry


def save(
    training: Training,
    talk: Talk,
    path: Any,
    *,
    tokenizer: Any,
    keep: Any,
    extra: dict[str, Any],
    note: Callable[[str], object],
) -> Path:
    """Save a prepared model and all that belongs to it; a collective. Returns the folder.

    Raises
    ------
    CheckpointError
        It cannot be saved, or not there; the same on all ranks, and what was there before is as it was.
    """
    entries: list[Entry] = []
    own: record.Record = {}

    def agree() -> tuple[str, int, Any]:
        folder = folder_of(path, "save")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(f"keep={keep!r} cannot be", "Give how many checkpoints are to be left, 1 or more.")
        entries.extend(training.prepared.entries())
        own.update(record.take(training, extra))
        return folder, own["step"], record.random_state(training)

    told = talk.do(agree)
    require_same([folder for folder, _, _ in told], "save(path)")
    require_same([step for _, step, _ in told], f"The step of {training.name}")
    own |= {"world_size": talk.size, "random": [random for _, _, random in told]}
    weights = [entry for entry in entries if entry.kind == WEIGHT]
    module = training.prepared.module
    writing = Writing(
        talk,
        layout.Run(Path(told[0][0])),
        own["step"],
        training.prepared,
        entries,
        own,
        beside=lambda folder: beside.write(folder, module, weights, tokenizer, note),
        keep=keep,
        note=note,
    )
    folder = writing.execute()
    if talk.rank == 0:
        note(f"Checkpoints go to {folder.parent}, {writing.bytes / 1e6:,.0f} MB each.")
    return folder
