"""Names in the folder of a run, and what stands behind them: whole checkpoints, the newest, what dead saves left.

A folder `step-N` with a `ddl.json` in it is a whole checkpoint: a save works in a hidden folder, which gets its name
in one moment when everything in it is on the disk. The hidden name tells which process works there, so that only what
a dead one left is removed. Limits: of processes on another host nothing is known; what they left is removed when
nothing in it has changed for an hour. Two jobs that save into one folder at the same time each make whole
checkpoints, and the later one is the latest.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import CheckpointError
from ddl_magics.lease import Process
from ddl_magics.rank.checkpoint import files

if TYPE_CHECKING:
    from pathlib import Path

RECORD = "ddl.json"
"""What else a checkpoint holds; its presence says that the folder is one."""
LATEST = "latest"
"""The file that names the newest whole checkpoint."""
OPTIMIZER = "optimizer"
STEP = re.compile(r"step-(\d+)")
HIDDEN = re.compile(r"\.(step-\d+|latest)\.(saving|replaced|removing)\.(.+)\.(\d+)\.(\d+)")
"""Of what, doing what, host, process number, its start in whole seconds of Unix time."""
SILENT_S = 3600.0
"""Seconds after which a hidden folder of another host counts as left over."""


def host() -> str:
    """Name of this machine, as it stands in hidden names."""
    return re.sub(r"[^\w-]", "-", socket.gethostname()) or "host"


@dataclass(frozen=True)
class Run:
    """The folder that a user names in `ddl.save`."""

    path: Path

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.path / f"step-{step}"

    def hidden(self, name: str, doing: str) -> Path:
        """Name beside `name` for something that only this process uses; `saving`, `replaced` or `removing`."""
        process = Process.of(os.getpid())
        return self.path / f".{name}.{doing}.{host()}.{process.pid}.{process.created:.0f}"

    def whole(self) -> list[Path]:
        """All whole checkpoints, the one that was saved first before the others."""
        found = [path for path in self.path.iterdir() if STEP.fullmatch(path.name) and (path / RECORD).is_file()]
        return sorted(found, key=lambda path: (_saved(path), int(path.name.removeprefix("step-"))))

    def latest(self) -> Path | None:
        """The newest whole checkpoint: the one that `latest` names; where nothing there is true, the last one saved.

        A checkpoint that was about to be replaced by another of its step counts, when the machine stopped just then.
        """
        file = self.path / LATEST
        if file.is_file():
            name = file.read_text().strip()
            replaced = [path for path in self._hidden() if path.name.startswith(f".{name}.replaced.")]
            for path in (self.path / name, *replaced):
                if STEP.fullmatch(name) and (path / RECORD).is_file():
                    return path
        whole = self.whole() if self.path.is_dir() else []
        return whole[-1] if whole else None

    def publish(self, hidden: Path, step: int) -> None:
        """Give a whole checkpoint its name, in the place of another of that step, and let `latest` name it."""
        place = self.checkpoint(step)
        latest = self.hidden(LATEST, "saving")
        files.write(latest, f"{place.name}\n")
        if not place.exists():
            files.rename(hidden, place)
        elif not files.exchange(hidden, place):
            files.rename(place, self.hidden(place.name, "replaced"))
            files.rename(hidden, place)
        files.keep_on_disk(self.path)
        files.rename(latest, self.path / LATEST)
        files.keep_on_disk(self.path)
        for path in (hidden, self.hidden(place.name, "replaced")):
            if path.exists():
                files.remove(path)

    def clean(self) -> None:
        """Remove what dead saves left; every hidden name of this process is one of a save that failed."""
        for path in self._hidden():
            name, doing, on, pid, created = _parts(path)
            if (on, int(pid)) != (host(), os.getpid()) and _at_work(path, on, Process(int(pid), float(created))):
                continue
            if doing == "replaced" and not (self.path / name).exists():
                files.rename(path, self.path / name)
            else:
                files.remove(path)

    def keep(self, count: int) -> None:
        """Remove whole checkpoints until `count` are left, the one that was saved first before the others."""
        for path in self.whole()[:-count]:
            hidden = self.hidden(path.name, "removing")
            files.rename(path, hidden)  # what is half removed must not look whole
            files.remove(hidden)

    def _hidden(self) -> list[Path]:
        return sorted(path for path in self.path.iterdir() if HIDDEN.fullmatch(path.name))


def _parts(path: Path) -> tuple[str, ...]:
    match = HIDDEN.fullmatch(path.name)
    assert match is not None
    return match.groups()


def _at_work(path: Path, on: str, process: Process) -> bool:
    if on == host():
        return process.alive()
    times = [one.lstat().st_mtime for one in (path, *path.rglob("*"))]
    return time.time() - max(times) < SILENT_S


def _saved(path: Path) -> float:
    """Unix time at which a checkpoint was saved; 0 where it does not tell."""
    try:
        return float(json.loads((path / RECORD).read_text())["saved"])
    except (ValueError, KeyError, TypeError):
        return 0.0


def record(path: Path) -> dict[str, Any]:
    """Read what else a checkpoint holds.

    Raises
    ------
    CheckpointError
        It is damaged, or of a later version than this one.
    """
    try:
        content = json.loads((path / RECORD).read_text())
        own = content.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path / RECORD) from error
    if own != seal(content)["sha256"]:
        raise _damaged(path / RECORD)
    if content["format"] != FORMAT:
        message = f"{path} has format {content['format']}, and this version reads {FORMAT}"
        raise CheckpointError(message, "Update ddl-magics.")
    return dict(content)


FORMAT = 1
"""Of `ddl.json` and the files beside it."""


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """Add to a record the digest of all the rest of it."""
    import hashlib

    return {**content, "sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest()}


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged", "Load an older checkpoint: give its own folder step-N.")
