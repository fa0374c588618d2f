"""File operations that a crash cannot tear: written, on the disk, and only then under their name.

Every change that a save makes to a folder goes through here, so that a test can stop a save between any two of them.
Limits: what a disk's own cache loses when the power goes is not ours to know; `exchange` is Linux's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]
    from pathlib import Path

CHUNK = 4 * 2**20
"""Bytes that are read, written or hashed at a time."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of renameat2(2): paths as they are; both names stay, and change places."""


class Draft:
    """A new file that is being written, with the digest of what is in it so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._digest = hashlib.sha256()
        self._file = path.open("xb", buffering=0)

    def write(self, data: Buffer) -> int:
        """Append all of it."""
        view = left = memoryview(data).cast("B")
        while left:
            count = self._file.write(left[:CHUNK])  # an interrupt is heard between two of them
            self._digest.update(left[:count])
            left = left[count:]
        self.size += len(view)
        return len(view)

    def finish(self) -> dict[str, int | str]:
        """Close it when it is on the disk; returns its size in bytes and its sha256."""
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}

    def abandon(self) -> None:
        """Close it as it is; nobody will read it."""
        with contextlib.suppress(OSError):  # what the last write could not put down is told here once more
            self._file.close()


def write(path: Path, data: str | bytes) -> dict[str, int | str]:
    """Write a new file; as `Draft.finish`."""
    draft = Draft(path)
    try:
        draft.write(data.encode() if isinstance(data, str) else data)
        return draft.finish()
    finally:
        draft.abandon()


def digest(path: Path) -> dict[str, int | str]:
    """Size in bytes and sha256 of a file."""
    found, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(CHUNK)
        while count := file.readinto(buffer):
            found.update(memoryview(buffer)[:count])
            size += count
    return {"bytes": size, "sha256": found.hexdigest()}


def keep_on_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder that must not be there yet."""
    path.mkdir()


def rename(path: Path, name: Path) -> None:
    """Give a file or folder another name in the same folder; a file may replace one, a folder nothing."""
    path.rename(name)


def exchange(path: Path, other: Path) -> bool:
    """Let two folders change places in one moment; False where the system or the file system cannot."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux, or a C library without it
        return False
    names = os.fsencode(path), os.fsencode(other)
    if function(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
        return False
    raise OSError(code, os.strerror(code), str(path))


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
