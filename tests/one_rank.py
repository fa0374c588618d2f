"""A context on one rank, in the process of the tests, and the beginning of its cells."""

from __future__ import annotations

import itertools

from ddl_magics.protocol import CellRequest, World
from ddl_magics.rank.context import Context

CELLS = itertools.count(1)


def one_rank() -> Context:
    return Context(World(0, 1, 0, 1))


def begin(rank: Context, **options) -> None:
    """Begin the next cell under `single`, with these options of a CellRequest."""
    number = next(CELLS)
    request = CellRequest(code="", cell=number, run=f"run{number}", name="", strategy="single", **options)
    rank.recorder.start_run(request.run)
    rank.begin_cell(request)
