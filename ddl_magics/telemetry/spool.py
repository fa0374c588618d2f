"""The full output of every rank on disk, for `%ddl log` and for a reader who comes later.

Two files a rank in a private folder: `rank-R.log`, the text as it was printed, which any tool can follow, and
`rank-R.index`, one fixed-size entry for each write: cell, stream, place, length, time. The text is written before its
entry, so a reader in another process never meets an entry without its text. Memory does not grow with the output.
When the disk is full the spool stops and says so in `failed`; the cell goes on.
"""

from __future__ import annotations

import os
import struct
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRY = struct.Struct("<IBQId")
"""Cell, stream, offset in the log, length in bytes, Unix time."""
Stream = Literal["stdout", "stderr", "traceback"]
"""`traceback`: how a cell failed on the rank, which the rank did not print."""
STREAMS: tuple[Stream, ...] = ("stdout", "stderr", "traceback")
TAIL = 256
"""Entries, counted from the end, among which `tail` looks."""
OPEN_RANKS = 64
"""Ranks whose files stay open between writes: 512 ranks would reach the limit of open files."""
MAX_WRITE = 1 << 18
"""Characters of one entry, so that a reader needs little memory at a time."""


@dataclass(frozen=True)
class Record:
    """Text that a rank printed in one go."""

    rank: int
    cell: int
    name: Stream
    time: float
    text: str


class Spool:
    """Append and read. One writing process; any number of readers, also in other processes.

    Parameters
    ----------
    folder
        Made with mode 0700 when it is missing; files get mode 0600. Nothing is touched before the first write.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.failed = ""
        """Why writing stopped, as one sentence; empty as long as it works."""
        self._lock = Lock()
        self._open: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def write(self, rank: int, cell: int, name: Stream, text: str) -> None:
        """Append what one rank printed. Never raises for a full or missing disk, see `failed`."""
        if not text or self.failed:
            return
        stream = STREAMS.index(name)
        with self._lock:
            try:
                log, index = self._files(rank)
                for start in range(0, len(text), MAX_WRITE):
                    part = text[start : start + MAX_WRITE].encode("utf-8", "backslashreplace")
                    offset = os.lseek(log, 0, os.SEEK_END)
                    _write_all(log, part)
                    _write_all(index, ENTRY.pack(cell, stream, offset, len(part), time.time()))
            except OSError as error:
                self.failed = f"Output is no longer kept in {self.folder}: {error.strerror or error}"

    def ranks(self) -> list[int]:
        """The ranks that have printed anything."""
        numbers = (path.stem.removeprefix("rank-") for path in self.folder.glob("rank-*.log"))
        return sorted(int(n) for n in numbers if n.isdigit())

    def records(self, rank: int, cell: int | None = None) -> Iterator[Record]:
        """What one rank printed, in order, in one cell or in all. Entries that are half written are left for later."""
        index = self._path(rank, "index")
        log = self._path(rank, "log")
        if not index.exists():
            return
        with index.open("rb") as entries, log.open("rb") as texts:
            while len(raw := entries.read(ENTRY.size)) == ENTRY.size:
                of_cell, stream, offset, length, when = ENTRY.unpack(raw)
                if cell is not None and of_cell != cell:
                    continue
                texts.seek(offset)
                text = texts.read(length).decode("utf-8", "replace")
                yield Record(rank, of_cell, STREAMS[stream], when, text)

    def read(self, rank: int | None = None, cell: int | None = None) -> str:
        """The text of one rank as it was printed; with `rank=None` that of all, one after the other under a title.

        Passages of stderr are the same text here; `records` tells them apart.
        """
        if rank is not None:
            return "".join(record.text for record in self.records(rank, cell))
        sections = []
        for each in self.ranks():
            text = self.read(each, cell)
            if text:
                end = "" if text.endswith("\n") else "\n"
                sections.append(f"--- rank {each} ---\n{text}{end}")
        return "".join(sections)

    def tail(self, rank: int, size: int = 4096) -> str:
        """The end of what a rank printed, tracebacks aside, at most `size` bytes; empty where it printed nothing."""
        found: list[bytes] = []
        try:
            with self._path(rank, "index").open("rb") as entries, self._path(rank, "log").open("rb") as log:
                whole = entries.seek(0, os.SEEK_END) // ENTRY.size
                first = max(0, whole - TAIL)
                entries.seek(first * ENTRY.size)
                last = list(ENTRY.iter_unpack(entries.read((whole - first) * ENTRY.size)))
                for _, stream, offset, length, _ in reversed(last):
                    if STREAMS[stream] != "traceback" and size > 0:
                        log.seek(offset + max(0, length - size))
                        found.append(log.read(min(length, size)))
                        size -= length
        except OSError:
            return ""
        return b"".join(reversed(found)).decode("utf-8", "replace")

    def cells(self, rank: int) -> list[int]:
        """The cells in which a rank printed."""
        index = self._path(rank, "index")
        if not index.exists():
            return []
        raw = index.read_bytes()
        whole = len(raw) - len(raw) % ENTRY.size
        return sorted({entry[0] for entry in ENTRY.iter_unpack(raw[:whole])})

    def close(self) -> None:
        """Close the files; a later write opens them again."""
        with self._lock:
            while self._open:
                self._close_oldest()

    def _path(self, rank: int, suffix: str) -> Path:
        return self.folder / f"rank-{rank}.{suffix}"

    def _files(self, rank: int) -> tuple[int, int]:
        if rank in self._open:
            self._open.move_to_end(rank)
            return self._open[rank]
        while len(self._open) >= OPEN_RANKS:
            self._close_oldest()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = _open_private(self._path(rank, "log"))
        try:
            index = _open_private(self._path(rank, "index"))
        except OSError:
            os.close(log)
            raise
        self._open[rank] = (log, index)
        return log, index

    def _close_oldest(self) -> None:
        _, descriptors = self._open.popitem(last=False)
        for descriptor in descriptors:
            os.close(descriptor)


def _open_private(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
