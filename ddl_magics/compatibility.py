"""Versions of Jupyter's parts that cannot work, refused in one line."""

from __future__ import annotations

from importlib.metadata import version

from ddl_magics.errors import StartError


def check() -> None:
    """Raise StartError under an ipykernel that we cannot run on."""
    installed = version("ipykernel")
    if installed.startswith("7.0."):
        msg = f"ipykernel {installed} cannot show output of a cluster's threads, so that a start never ends"
        raise StartError(msg, "pip install 'ipykernel!=7.0.*'")
