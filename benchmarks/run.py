"""All benchmarks, one after the other, and one table: `make bench`."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from benchmarks import checkpoint, control, empty_cell, generate, output, pretrained, sampler, soak, start, training
from benchmarks.measure import machine, table

if TYPE_CHECKING:
    from types import ModuleType

BENCHMARKS = [empty_cell, start, training, sampler, output, checkpoint, pretrained, generate]
"""Each compares us with another way to do the same."""

REPORTS = [control, soak]
"""Each has a table of its own."""


def main() -> None:
    """Measure, saying what is measured, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a first look: fewer repeats and ranks")
    quick = parser.parse_args().quick
    where, began, rows = machine(), time.monotonic(), []
    for benchmark in BENCHMARKS:
        announce(benchmark)
        found = benchmark.measure(quick)
        print(table(found) + "\n", flush=True)
        rows += found
    print(f"{where}\n\n{table(rows)}\n", flush=True)
    for benchmark in REPORTS:
        announce(benchmark)
        print(benchmark.report(quick=quick) + "\n", flush=True)
    print(f"{(time.monotonic() - began) / 60:.0f} minutes")


def announce(benchmark: ModuleType) -> None:
    """Say what is measured now."""
    name = benchmark.__name__.rpartition(".")[2]
    print(f"bench: {name}: {(benchmark.__doc__ or '').splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
