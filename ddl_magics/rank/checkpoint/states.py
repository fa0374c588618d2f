"""The optimizer's state as `torch.distributed.checkpoint` reads it, written one tensor after the other as they come.

Its own `save` wants all tensors of a rank at once, and writes what a rank holds. Here each whole tensor is appended to
its owner's file as `torch.save` writes it, and rank 0 writes `.metadata`, which tells where each one is. Keys are
`NAME/KIND`. Reading maps the files into memory, so that a rank reads only what it holds. Limits: `_StorageInfo` is
torch's private name for a place in a file; tests read the folder with the plain library.
"""

from __future__ import annotations

import mmap
import pickle
import zipfile
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ddl_magics.rank.checkpoint.files import CHUNK, Draft
from ddl_magics.rank.signals import held
from ddl_magics.strategies.base import Entry

if TYPE_CHECKING:
    from collections.abc import Buffer, Callable  # type: ignore[attr-defined]
    from pathlib import Path

METADATA = ".metadata"
VERSION = "1.0.0"
"""Of the library's format."""
SMALL = 2**16
"""Bytes below which a piece is written together with others."""


class Place(NamedTuple):
    """Where one tensor is."""

    file: str
    offset: int
    length: int


class StatesDraft:
    """One rank's file of whole tensors that is being written."""

    def __init__(self, path: Path) -> None:
        self._draft = Draft(path)
        self.places: list[tuple[Entry, Place]] = []

    def add(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Write one tensor."""
        start = self._draft.size
        with held() as stopped:
            archive = _Archive(self._draft, stopped)
            torch.save(tensor.detach(), cast("IO[bytes]", archive))
            archive.finish()
        place = Place(self._draft.path.name, start, self._draft.size - start)
        self.places.append((entry, place))

    def finish(self) -> dict[str, int | str]:
        """See `Draft.finish`."""
        return self._draft.finish()

    def abandon(self) -> None:
        """See `Draft.abandon`."""
        self._draft.abandon()


class _Archive:
    """What `torch.save` writes one archive to; it must not raise in there, since torch's writer cannot be left then.

    Once `stopped` the rest is dropped.
    """

    def __init__(self, draft: Draft, stopped: Callable[[], bool]) -> None:
        self._draft = draft
        self._stopped = stopped
        self._failure: OSError | None = None
        self._small = bytearray()
        """What was written in small pieces, of which there are many around each tensor."""

    def write(self, data: Buffer) -> int:
        size = memoryview(data).nbytes
        if size < SMALL:
            self._small += data
        else:
            self.flush()
            self._put(data)
        return size

    def flush(self) -> None:
        small, self._small = self._small, bytearray()
        self._put(small)

    def finish(self) -> None:
        """Write the rest, and raise what went wrong on the way."""
        self.flush()
        if self._failure is not None:
            raise self._failure

    def _put(self, data: Buffer) -> None:
        try:
            view = memoryview(data).cast("B")
            for start in range(0, len(view), CHUNK):
                if self._failure is None and not self._stopped():
                    self._draft.write(view[start : start + CHUNK])
        except OSError as error:
            self._failure = error


def file_name(rank: int) -> str:
    """Of one rank's file, as the library names it."""
    return f"__{rank}_0.distcp"


def metadata(places: list[tuple[Entry, Place]]) -> bytes:
    """Content of `.metadata` for tensors that are whole in one place each."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for entry, place in places:
        key, size = f"{entry.name}/{entry.kind}", torch.Size(entry.shape)
        start = torch.Size([0] * len(size))
        chunk = ChunkStorageMetadata(offsets=start, sizes=size)
        tensors[key] = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), size, [chunk])
        storage[MetadataIndex(key, start)] = _StorageInfo(place.file, place.offset, place.length)
    # What the default planner of a load looks up: names as they stand in the nested dict, which this one is not.
    names = {key: (key,) for key in tensors}
    return pickle.dumps(Metadata(tensors, names, storage, StorageMeta(), VERSION))


def to_plain(places: list[tuple[Entry, Place]]) -> list[list[Any]]:
    """What `ddl.json` says of the tensors, so that reading needs no pickle."""
    return [[e.name, e.kind, list(e.shape), str(e.dtype).removeprefix("torch."), *place] for e, place in places]


def read_folder(folder: Path, plain: list[list[Any]]) -> list[tuple[Entry, Mapped]]:
    """Tensors of a folder, each read as far as somebody asks."""
    maps: dict[str, mmap.mmap] = {}
    tensors = []
    for name, kind, shape, dtype, file, offset, length in plain:
        if file not in maps:
            with (folder / file).open("rb") as opened:
                maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants to be able to write
        entry = Entry(name, kind, tuple(shape), getattr(torch, dtype))
        tensors.append((entry, Mapped(entry, maps[file], offset, length)))
    return tensors


class Mapped:
    """One tensor in a file that is mapped into memory: only what is asked for is read from the disk."""

    def __init__(self, entry: Entry, file: mmap.mmap, offset: int, length: int) -> None:
        self.shape = entry.shape
        self.dtype = entry.dtype
        self._file = file
        self._archive = offset, length

    def __getitem__(self, index: Any) -> torch.Tensor:
        count = torch.Size(self.shape).numel()
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)[index]
        flat = torch.frombuffer(self._file, dtype=self.dtype, count=count, offset=self._start())
        part: torch.Tensor = flat.reshape(self.shape)[index]  # which keeps the file mapped
        return part

    def _start(self) -> int:
        """Where in the file the tensor's bytes begin: torch's archive is a zip that compresses nothing."""
        offset, length = self._archive
        with zipfile.ZipFile(_Window(self._file, offset, length)) as archive:
            found = next(item for item in archive.infolist() if item.filename.endswith("/data/0"))
        local = offset + found.header_offset
        name, extra = (int.from_bytes(self._file[local + at : local + at + 2], "little") for at in (26, 28))
        return local + 30 + name + extra


class _Window:
    """Part of a mapped file, as a file that `zipfile` reads."""

    def __init__(self, file: mmap.mmap, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = 0) -> int:
        self._at = position + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        stop = self._length if count < 0 else min(self._at + count, self._length)
        data = self._file[self._offset + self._at : self._offset + stop]
        self._at += len(data)
        return data
