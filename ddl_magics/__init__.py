"""Distributed deep learning in a notebook: `%load_ext ddl_magics`, `%ddl start`, `%%ddl`.

In a script under torchrun, srun or mpiexec: `ddl = ddl_magics.init("zero:3")`. Nothing heavy is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddl_magics.rank.program import Program

__all__ = ["init", "load_ipython_extension", "unload_ipython_extension"]
__version__ = "0.1.0"


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Define `%ddl` and `%%ddl`; called by `%load_ext ddl_magics`."""
    from ddl_magics.compatibility import check
    from ddl_magics.magics import DDLMagics

    check()
    ipython.register_magics(DDLMagics)
    ipython.magics_manager.registry["DDLMagics"].completion.install()


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """End the ranks and forget the magics."""
    magics = ipython.magics_manager.registry.pop("DDLMagics", None)
    if magics:
        magics.completion.remove()
        magics.record.close()
        magics.session.close()


def init(strategy: str | None = None, **options: Any) -> Program:
    """Make this process a rank of the world that torchrun, srun or mpiexec started, and return its context.

    Parameters
    ----------
    strategy
        As `--strategy` of a cell: `ddp`, `zero:3`, `axonn:2x1x1`, ...; None: as `ddl-magics run` says, else `ddp`.
    options
        See `ddl_magics.rank.program.init`.
    """
    from ddl_magics.rank import program

    return program.init(strategy, **options)
