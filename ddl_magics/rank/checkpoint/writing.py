"""`ddl.save`: every rank writes the whole tensors that it owns, one at a time, and the folder appears in one moment.

Work goes into a hidden folder beside. A rank that cannot write goes on taking part in the gathering, so that nobody
waits for it; then all decide together whether the checkpoint is whole. Memory beside the model: one whole tensor.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import CheckpointError
from ddl_magics.rank.checkpoint import files, layout, shares, states, tensors
from ddl_magics.rank.checkpoint.talk import REMEDIES

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ddl_magics.rank.checkpoint.talk import Talk
    from ddl_magics.strategies.base import Entry, Prepared

WEIGHT = "weight"
PROBE = ".probe"
"""A file by which ranks see that they share the folder."""


@dataclass
class Writing:
    """One save; all ranks of the model make one and call `execute`.

    Parameters
    ----------
    run
        Where to.
    step
        Of which step this is the checkpoint.
    entries
        What is saved of the model, the same on all ranks.
    record
        What goes into `ddl.json` beside what is told here.
    """

    talk: Talk
    run: layout.Run
    step: int
    prepared: Prepared
    entries: list[Entry]
    record: dict[str, Any]
    beside: Callable[[Path], None]
    """Writes, on rank 0, what else the folder needs beside the weights, such as config.json."""
    keep: int | None = None
    note: Callable[[str], object] = print
    _digests: dict[str, dict[str, int | str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = tensors.in_order([entry for entry in self.entries if entry.kind == WEIGHT])
        self.states = [entry for entry in self.entries if entry.kind != WEIGHT]
        self.files = shares.weight_files(self.weights, self.talk.size)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(map(shares.nbytes, self.entries))

    def execute(self) -> Path:
        """Write it; a collective. Returns the folder, in which the checkpoint is whole.

        Raises
        ------
        CheckpointError
            It could not be written; the same on all ranks. What was there before is there still.
        """
        try:
            hidden = Path(self.talk.of_first(self._begin))
            self._check_shared(hidden)
            places = self._write_tensors(hidden)
            self.talk.of_first(lambda: self._finish(hidden, places))
        except BaseException:
            if self.talk.rank == 0:
                self._take_away()
            raise
        self.talk.of_first(self._remove_old)
        return self.run.checkpoint(self.step)

    def _begin(self) -> str:
        """Make the hidden folder, on rank 0."""
        path, place = self.run.path, self.run.checkpoint(self.step)
        path.mkdir(parents=True, exist_ok=True)
        if place.exists() and not (place / layout.RECORD).is_file():
            message = f"{place} is there and is no checkpoint, so that it is not replaced"
            raise CheckpointError(message, "Save into another folder.")
        self.run.clean()
        hidden = self.run.hidden(place.name, "saving")
        files.make_folder(hidden)
        if self.states:
            files.make_folder(hidden / layout.OPTIMIZER)
        files.write(hidden / PROBE, secrets.token_hex(8))
        return str(hidden)

    def _check_shared(self, hidden: Path) -> None:
        """Raise on all ranks where some see another folder than rank 0."""
        probe = hidden / PROBE
        told = self.talk.do(lambda: (layout.host(), probe.read_text() if probe.is_file() else ""))
        apart = [(rank, host) for rank, (host, seen) in enumerate(told) if seen != told[0][1]]
        if apart:
            rank, host = apart[0]
            message = f"{self.run.path} on rank {rank} ({host}) is another folder than on rank 0 ({told[0][0]})"
            raise CheckpointError(message, "Save into a folder that all nodes share.")

    def _write_tensors(self, hidden: Path) -> list[tuple[Entry, states.Place]]:
        """Gather every tensor at its owner, who writes it; returns where all states are, on every rank."""
        share = _Share(self, hidden)
        try:
            for entry, to in share.plan():
                share.take(entry, self.prepared.gather(entry, to))
            told = self.talk.do(share.finish)
        finally:
            share.abandon()
        for digests, _ in told:
            self._digests |= digests
        by_key = {(entry.name, entry.kind): (entry, place) for _, places in told for entry, place in places}
        return [by_key[entry.name, entry.kind] for entry in self.states]

    def _finish(self, hidden: Path, places: list[tuple[Entry, states.Place]]) -> None:
        """Write all that is not tensors, on rank 0, and give the folder its name."""
        files.remove(hidden / PROBE)
        if places:
            files.write(hidden / layout.OPTIMIZER / states.METADATA, states.metadata(places))
        if len(self.files) > 1:
            names = {entry.name: file.name for file in self.files for entry in file.entries}
            total = sum(map(shares.nbytes, self.weights))
            files.write(hidden / tensors.INDEX, tensors.index(names, total))
        self.beside(hidden)
        for path in sorted(path for path in hidden.rglob("*") if path.is_file()):
            name = path.relative_to(hidden).as_posix()
            if name not in self._digests:
                files.keep_on_disk(path)
                self._digests[name] = files.digest(path)
        record = {"format": layout.FORMAT, "saved": time.time(), **self.record}
        record |= {"states": states.to_plain(places), "files": dict(sorted(self._digests.items()))}
        files.write(hidden / layout.RECORD, json.dumps(layout.seal(record)))
        if places:
            files.keep_on_disk(hidden / layout.OPTIMIZER)
        files.keep_on_disk(hidden)
        self.run.publish(hidden, self.step)

    def _take_away(self) -> None:
        """Remove what a save that failed has left; what cannot be removed now, the next save removes."""
        for name in (self.run.checkpoint(self.step).name, layout.LATEST):
            hidden = self.run.hidden(name, "saving")
            try:
                if hidden.exists():
                    files.remove(hidden)
            except OSError as error:
                self.note(f"{hidden} could not be removed yet: {error.strerror}.")

    def _remove_old(self) -> None:
        if self.keep is None:
            return
        try:
            self.run.keep(self.keep)
        except OSError as error:  # the new one is whole, and that is what was asked for
            self.note(f"An old checkpoint could not be removed: {error}.")


class _Share:
    """What one rank writes of a save."""

    def __init__(self, writing: Writing, hidden: Path) -> None:
        self._writing = writing
        self._hidden = hidden
        self._rank = writing.talk.rank
        self._failure: Exception | None = None
        self._weights: dict[str, tensors.WeightsDraft] = {}
        self._states: states.StatesDraft | None = None
        self._file_of = {entry.name: file for file in writing.files for entry in file.entries}
        self._open()

    def plan(self) -> list[tuple[Entry, int]]:
        """Every tensor of the checkpoint and its owner, in the order in which all ranks gather them."""
        writing = self._writing
        owners = [(entry, self._file_of[entry.name].rank) for entry in writing.weights]
        states_owners = shares.states_owners(writing.states, writing.files, writing.talk.size)
        return [*owners, *zip(writing.states, states_owners, strict=True)]

    def take(self, entry: Entry, tensor: torch.Tensor | None) -> None:
        """Write a tensor that this rank owns; after a failure the rest is dropped."""
        if tensor is None or self._failure is not None:
            return
        try:
            if entry.kind == WEIGHT:
                self._weights[self._file_of[entry.name].name].add(entry, tensor)
            else:
                assert self._states is not None
                self._states.add(entry, tensor)
        except Exception as error:  # noqa: BLE001 - told when all have gathered, who wait for this rank until then
            self._failure = error

    def finish(self) -> tuple[dict[str, dict[str, int | str]], list[tuple[Entry, states.Place]]]:
        """Wait until all is on the disk; returns digests by file, and where the states are."""
        try:
            if self._failure is not None:
                raise self._failure
            digests = {name: draft.finish() for name, draft in self._drafts().items()}
        except OSError as error:
            raise self._explained(error) from error
        return digests, self._states.places if self._states is not None else []

    def abandon(self) -> None:
        """Close what is open still."""
        for draft in self._drafts().values():
            draft.abandon()

    def _drafts(self) -> dict[str, tensors.WeightsDraft | states.StatesDraft]:
        """By name in the folder."""
        if self._states is None:
            return {**self._weights}
        return {**self._weights, f"{layout.OPTIMIZER}/{states.file_name(self._rank)}": self._states}

    def _open(self) -> None:
        try:
            for file in self._writing.files:
                if file.rank == self._rank:
                    self._weights[file.name] = tensors.WeightsDraft(self._hidden / file.name, file.entries)
            if any(owner == self._rank for entry, owner in self.plan() if entry.kind != WEIGHT):
                self._states = states.StatesDraft(self._hidden / layout.OPTIMIZER / states.file_name(self._rank))
        except OSError as error:
            self._failure = error
        except BaseException:  # an interrupt
            self.abandon()
            raise

    def _explained(self, error: OSError) -> CheckpointError:
        writing = self._writing
        free = os.statvfs(writing.run.path)
        message = (
            f"Rank {self._rank} could not write to {writing.run.path}: {error.strerror}"
            f" (the checkpoint has {writing.bytes:,} bytes, {free.f_bavail * free.f_frsize:,} are free)"
        )
        return CheckpointError(message, REMEDIES.get(error.errno or 0, "The checkpoints that were there are whole."))
