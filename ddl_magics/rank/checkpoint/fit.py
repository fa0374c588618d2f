"""Whether what a folder holds fits a model: files as they were written, and the same names and shapes.

Every fault is found before anything is changed. Limits: a folder that another program wrote has no digests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddl_magics.errors import CheckpointError
from ddl_magics.rank.checkpoint import files
from ddl_magics.strategies.weights import in_words

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from ddl_magics.rank.checkpoint.record import Record
    from ddl_magics.strategies.base import Entry, Whole


def verify(folder: Path, record: Record, rank: int, ranks: int) -> None:
    """Compare this rank's part of the files with their digests, so that all ranks together read each file once.

    Raises
    ------
    CheckpointError
        A file is missing, or is not as it was written.
    """
    by_size = sorted(record["files"].items(), key=lambda item: -item[1]["bytes"])
    for name, wanted in by_size[rank::ranks]:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing", REMEDY)
        size = path.stat().st_size
        if size != wanted["bytes"]:
            raise CheckpointError(f"{path} has {size:,} bytes and was written with {wanted['bytes']:,}", REMEDY)
        if files.digest(path) != wanted:
            raise CheckpointError(f"{path} is not as it was written (sha256)", REMEDY)


REMEDY = "Load an older checkpoint: give its own folder step-N."


def match(
    module: torch.nn.Module, own: list[Entry], found: Mapping[str, Whole], name: str, folder: Path
) -> list[tuple[Entry, Whole]]:
    """Pairs of a model's weight and the tensor of the folder that belongs to it.

    Hugging Face saves one of several tied names, and older versions of it saved buffers that are made anew now.

    Raises
    ------
    CheckpointError
        Names that are missing, unexpected, or of another shape; the first few of them are shown.
    """
    names = _names(module)
    weights = {entry.name: entry for entry in own}
    chosen: dict[str, str] = {}
    for given in found:
        first = names.get(given)
        if first in weights and (first not in chosen or given == first):
            chosen[first] = given
    made_anew = {buffer for buffer, _ in module.named_buffers()} - names.keys()
    faults = {
        "missing in it": [one for one in weights if one not in chosen],
        "unknown here": [given for given in found if given not in names and given not in made_anew],
        "of another shape": [
            f"{one} {tuple(found[given].shape)}, here {weights[one].shape}"
            for one, given in chosen.items()
            if tuple(found[given].shape) != tuple(weights[one].shape)
        ],
    }
    told = in_words(faults)
    if told:
        message = f"{folder} is of another model than this {name}: {told}"
        raise CheckpointError(message, "Build the model that was saved; nothing was changed.")
    return [(weights[one], found[given]) for one, given in chosen.items()]


def _names(module: torch.nn.Module) -> dict[str, str]:
    """Every name of a weight -> the first name of the same tensor."""
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(tensor), name) for name, tensor in module.state_dict(keep_vars=True).items()}
