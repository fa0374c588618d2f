"""The one folder of a cluster: keys, logs, the ranks' output, and the card by which a terminal finds it.

`<Jupyter's runtime folder>/ddl_magics/<cluster id>/`, private to the user (0700), removed when the cluster is stopped.
Folders of clusters whose processes are all gone are removed at the next start.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_runtime_dir

from ddl_magics.errors import StartError
from ddl_magics.lease import Process


def root() -> Path:
    """The folder that holds the folders of all clusters of this user."""
    return Path(jupyter_runtime_dir()) / "ddl_magics"


@dataclass
class Card:
    """What a terminal must know of a cluster to find and end it."""

    cluster_id: str
    owner: Process
    """The notebook's kernel."""
    started: float
    options: dict[str, Any]
    processes: list[Process] = field(default_factory=list)
    """The launcher, the ranks and what they started."""
    controller: list[Process] = field(default_factory=list)
    """The controller and what it started; it goes last."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """By rank: host, pid, device, engine."""

    def alive(self) -> bool:
        """Whether any process of the cluster runs."""
        return any(process.alive() for process in self.processes + self.controller)


class ClusterFolder:
    """The folder of one cluster; also its ipyparallel profile."""

    def __init__(self, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self.path = root() / cluster_id

    @classmethod
    def new(cls) -> ClusterFolder:
        """Make a folder with an id that is not taken."""
        folder = cls(f"ddl-{secrets.token_hex(4)}")
        try:
            folder._make()
        except OSError as error:
            msg = f"the folder {folder.path} cannot be made: {error.strerror}"
            raise StartError(msg, "Set JUPYTER_RUNTIME_DIR to a folder that you can write") from None
        return folder

    def _make(self) -> None:
        for path in (self.path, self.output, self.path / "security", self.path / "log", self.path / "pid"):
            path.mkdir(mode=0o700, parents=True)

    @property
    def output(self) -> Path:
        """Where the full output of every rank is kept."""
        return self.path / "output"

    @property
    def client_file(self) -> Path:
        """Connection file for a client: address and key."""
        return self.path / "security" / f"ipcontroller-{self.cluster_id}-client.json"

    @property
    def card_file(self) -> Path:
        """See `Card`."""
        return self.path / "cluster.json"

    def write_card(self, card: Card) -> None:
        """Replace the card in one step: a terminal may be reading it."""
        new = self.card_file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(asdict(card), indent=1))
        new.replace(self.card_file)

    def read_card(self) -> Card:
        """Read the card. Raises FileNotFoundError where the cluster never came up or was removed."""
        card = Card(**json.loads(self.card_file.read_text()))
        card.owner = Process(**card.owner)  # type: ignore[arg-type]
        card.processes = [Process(**process) for process in card.processes]  # type: ignore[arg-type]
        card.controller = [Process(**process) for process in card.controller]  # type: ignore[arg-type]
        return card

    def mark_stopped(self) -> None:
        """Tell the notebook that its cluster is ended on purpose."""
        (self.path / "stopped").touch(mode=0o600)

    @property
    def stopped(self) -> bool:
        """Whether somebody ended the cluster on purpose, and not by the notebook."""
        return (self.path / "stopped").exists() or not self.path.exists()

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def clusters() -> list[ClusterFolder]:
    """Folders of clusters of this user that have a card, oldest first."""
    if not root().is_dir():
        return []
    found = [ClusterFolder(path.name) for path in root().iterdir()]
    return sorted((c for c in found if c.card_file.exists()), key=lambda c: c.card_file.stat().st_mtime)


def remove_leftovers() -> None:
    """Delete folders whose cluster has no process left, and half-made ones whose owner is gone."""
    for folder in clusters():
        card = folder.read_card()
        if not card.alive() and not (card.owner.alive() and card.owner.pid != os.getpid()):
            folder.remove()
