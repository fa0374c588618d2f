"""ipyparallel's controller, ending when its notebook's kernel does.

Run as `python -m ddl_magics.cluster.controller`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ipyparallel.controller.app import IPController

from ddl_magics import lease


class Controller(IPController):
    """A controller whose connection files appear whole: the ranks and the notebook read them as soon as they exist."""

    def save_connection_dict(self, fname: str, cdict: dict[str, Any]) -> None:
        """Write one connection file beside its place, and move it there."""
        super().save_connection_dict(f"{fname}.new", cdict)
        folder = Path(self.profile_dir.security_dir)
        (folder / f"{fname}.new").replace(folder / fname)


if __name__ == "__main__":
    lease.end_with_owner()
    Controller.launch_instance()
