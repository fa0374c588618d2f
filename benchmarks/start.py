"""From nothing to the end of a first all-reduce: `%ddl start` and a cell, against torchrun and a script."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.measure import CountingNotebook, Row, cell_of, in_turn, main, torchrun

SCRIPT = Path(__file__).with_name("first_collective.py")


def ours(ranks: int) -> float:
    """Seconds until rank 0 has the result of its first all-reduce; the kernel runs already, without torch."""
    notebook = CountingNotebook()
    began = time.time()
    notebook.run(f"%ddl start -n {ranks} --device cpu --env OMP_NUM_THREADS=1")
    shown = notebook.run(f"%%ddl --output rank0\n{cell_of(SCRIPT)}")
    took = finished(shown.stdout) - began
    notebook.run("%ddl stop")
    notebook.close()
    return took


def theirs(ranks: int) -> float:
    """Seconds until rank 0 of the script has the result."""
    began = time.time()
    return finished(torchrun(SCRIPT, ranks)) - began


def finished(printed: str) -> float:
    """The Unix time that rank 0 printed."""
    return float(printed.partition("finished at ")[2].split()[0])


def measure(quick: bool) -> list[Row]:
    """Seconds at 2 and 4 ranks."""
    rows = []
    for ranks in (2,) if quick else (2, 4):
        medians = in_turn(2 if quick else 5, lambda n=ranks: ours(n), lambda n=ranks: theirs(n))
        rows.append(Row(f"start to first collective, {ranks} ranks", "torchrun", *medians, "s", aim=1.3))
    return rows


if __name__ == "__main__":
    main(measure, __doc__ or "")
