"""A notebook for the soak: it notes when something stood on the screen, and what its kernel and ranks hold.

Every process that comes of the notebook carries a mark in its environment, so that none is missed that has left its
parent. Times are Unix times: front end, kernel and ranks are on one machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import psutil

from tests.notebook import ANSI, Notebook

if TYPE_CHECKING:
    from tests.notebook import Shown

MARK = "DDL_SOAK"
SETUP = Path(__file__).with_name("soak_setup.py")


class SoakNotebook(Notebook):
    """A kernel whose front end knows when what was shown.

    Parameters
    ----------
    folder
        Of its own: for the clusters' files, and for the moments that ranks write down.
    """

    def __init__(self, folder: Path) -> None:
        self.mark = uuid4().hex
        self.arrivals: list[tuple[float, str]] = []
        self.moments, self.runtime = folder / "moments", folder / "runtime"
        self.moments.mkdir()
        self.runtime.mkdir()
        super().__init__(env={MARK: self.mark, "JUPYTER_RUNTIME_DIR": str(self.runtime)})

    def send(self, code: str, *, allow_stdin: bool = True) -> str:
        """Send a cell; nothing has been shown or written down for it yet."""
        self.arrivals = []
        for file in self.moments.iterdir():
            file.unlink()
        return super().send(code, allow_stdin=allow_stdin)

    def _take(self, shown: Shown, msg: dict, places: dict) -> None:
        content = msg["content"]
        text = content.get("text") or "\n".join([*content.get("traceback", ()), content.get("evalue", "")])
        self.arrivals.append((time.time(), ANSI.sub("", text)))
        super()._take(shown, msg, places)

    def seen(self, text: str) -> float | None:
        """When it stood on the screen first, of the last cell."""
        return next((when for when, shown in self.arrivals if text in shown), None)

    def written(self) -> list[float]:
        """The moments that ranks wrote down in the last cell, the earliest first."""
        found = []
        for file in self.moments.iterdir():
            with suppress(ValueError):  # of a rank that was killed meanwhile
                found.append(float(file.read_text()))
        return sorted(found)

    def setup(self) -> str:
        """The cell that gives each rank what the others use."""
        return f"%%ddl\nMOMENTS = {str(self.moments)!r}\n{SETUP.read_text().partition('# The cell:')[2]}"

    def processes(self) -> set[psutil.Process]:
        """All that come of this notebook and live, the kernel included; one is known by number and start time."""
        found = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process)
        return found

    def where(self) -> str:
        """Where every rank is, asked from a terminal: the kernel may be busy."""
        done = subprocess.run(
            [sys.executable, "-m", "ddl_magics.cli", "where"],
            env={**os.environ, "JUPYTER_RUNTIME_DIR": str(self.runtime)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def end_all(self) -> None:
        """Leave no process of a run that broke off."""
        for process in (left := self.processes()):
            process.kill()
        psutil.wait_procs(left, timeout=10)

    def files(self) -> list[Path]:
        """What clusters have left in their folders."""
        return [path for path in self.runtime.rglob("*") if path.is_file()]


@dataclass(frozen=True)
class Held:
    """What one process holds."""

    threads: int
    sockets: int
    other_files: int
    """Open files, pipes and the like."""
    zombies: int
    """Children that have ended and were not waited for."""
    resident: float
    """MiB."""

    @classmethod
    def by(cls, pid: int) -> Held:
        """What a process holds now."""
        process = psutil.Process(pid)
        targets = []
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                targets.append(str(link.readlink()))
        sockets = sum(target.startswith("socket:") for target in targets)
        zombies = 0
        for child in process.children():
            with suppress(psutil.NoSuchProcess):
                zombies += child.status() == psutil.STATUS_ZOMBIE
        resident = process.memory_info().rss / 2**20
        return cls(process.num_threads(), sockets, len(targets) - sockets, zombies, resident)

    def cells(self) -> list[str]:
        """Text of the columns of a table."""
        return [str(self.threads), str(self.sockets), str(self.other_files), str(self.zombies), f"{self.resident:.0f}"]


HELD = ["threads", "sockets", "other open files", "zombies", "MiB resident"]
