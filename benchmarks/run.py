"""All benchmarks, one after the other, and one table: `make bench`."""

from __future__ import annotations

import argparse
import time

from benchmarks import empty_cell, output, sampler, start, training
from benchmarks.measure import machine, table

BENCHMARKS = [empty_cell, start, training, sampler, output]


def main() -> None:
    """Measure, saying what is measured, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a first look: fewer repeats and ranks")
    quick = parser.parse_args().quick
    where, began, rows = machine(), time.monotonic(), []
    for benchmark in BENCHMARKS:
        name = benchmark.__name__.rpartition(".")[2]
        print(f"bench: {name}: {(benchmark.__doc__ or '').splitlines()[0]}", flush=True)
        found = benchmark.measure(quick)
        print(table(found) + "\n", flush=True)
        rows += found
    print(f"{where}\n\n{table(rows)}\n\n{(time.monotonic() - began) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
