"""What all benchmarks share: kernels, medians, and the rows of the table that they print.

A row is a ratio of two medians taken in one run, the two sides in turn, so that what else the machine does at that time
weighs on both. Numbers of different runs or machines do not compare.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.notebook import Notebook, Shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parents[1]

PLAIN_MPI = {
    # A plain ipyparallel cluster needs these as root and with more ranks than cores; ddl_magics sets them itself.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMP_NUM_THREADS": "1",
    # It looks for mpiexec on PATH only.
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


@dataclass(frozen=True)
class Row:
    """One comparison: ours against another way to do the same."""

    what: str
    other: str
    """What we compare with."""
    ours: float
    theirs: float
    unit: str
    aim: float | None = None
    """The ratio that is aimed at; None: the row only informs."""
    higher_is_better: bool = False

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        """Whether the aim is met."""
        if self.aim is None:
            return None
        return self.ratio >= self.aim if self.higher_is_better else self.ratio <= self.aim

    def cells(self) -> list[str]:
        """Text of the columns of the table."""
        aim = "" if self.aim is None else f"{'≥' if self.higher_is_better else '≤'} {self.aim:g}"
        verdict = {None: "", True: "met", False: "missed"}[self.met]
        return [
            self.what, number(self.ours), self.other, number(self.theirs), self.unit, f"{self.ratio:.3f}", aim, verdict,
        ]  # fmt: skip


HEADER = ["what", "ours", "against", "theirs", "unit", "ratio", "aim", ""]


def number(value: float) -> str:
    """Three significant digits, without powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """A Markdown table that reads as plain text too."""
    return grid(HEADER, [row.cells() for row in rows])


def grid(head: list[str], lines: list[list[str]]) -> str:
    """Any such table."""
    all_lines = [head, *lines]
    widths = [max(len(line[i]) for line in all_lines) for i in range(len(head))]
    shown = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |"
        for line in all_lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([shown[0], rule, *shown[1:]])


def machine() -> str:
    """Where and when the numbers were taken."""
    from importlib import metadata

    names = ("torch", "ipyparallel", "ipykernel", "mpi4py")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{time.strftime('%Y-%m-%d')}; {os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB, no GPU used; "
        f"Python {platform.python_version()}, {versions}; load {os.getloadavg()[0]:.1f} before"
    )


def in_turn(times: int, *sides: Callable[[], float]) -> list[float]:
    """Medians of several measurements taken in turn."""
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(times):
        for values, side in zip(taken, sides, strict=True):
            values.append(side())
    return [statistics.median(values) for values in taken]


class CountingNotebook(Notebook):
    """A kernel whose front end counts what is published: bytes of the content of every message."""

    published = 0

    def run(self, code: str, timeout: float = 600, **kwargs: object) -> Shown:
        """Run a cell to its end; raises where it failed."""
        self.published = 0
        began = time.perf_counter()
        shown = super().run(code, timeout, **kwargs)
        shown.seconds = time.perf_counter() - began  # from before the request is sent
        if shown.ename:
            message = f"the cell failed:\n{code}\n{shown.text}"
            raise RuntimeError(message)
        return shown

    def _take(self, shown: Shown, msg: dict, places: dict) -> None:
        self.published += len(json.dumps(msg["content"], ensure_ascii=False).encode())
        super()._take(shown, msg, places)


def ddl(ranks: int) -> CountingNotebook:
    """A kernel with our ranks."""
    notebook = CountingNotebook()
    notebook.run(f"%ddl start -n {ranks} --device cpu --env OMP_NUM_THREADS=1")
    return notebook


def plain(ranks: int) -> CountingNotebook:
    """A kernel with a plain ipyparallel MPI cluster, `rc` and `%px` in it."""
    notebook = CountingNotebook(env=PLAIN_MPI, load=False)
    notebook.run(
        "import tempfile\n"
        "import ipyparallel as ipp\n"
        "folder = tempfile.TemporaryDirectory()\n"
        f"cluster = ipp.Cluster(engines='mpi', n={ranks}, log_level=40, profile_dir=folder.name)\n"
        "rc = cluster.start_and_connect_sync()"  # defines %px, which waits for its result
    )
    return notebook


def close(notebook: CountingNotebook) -> None:
    """End the ranks of either kind, then the kernel."""
    notebook.run(
        "cluster.stop_cluster_sync() if 'cluster' in globals() else get_ipython().run_line_magic('ddl', 'stop')"
    )
    notebook.close()


def cell_of(script: Path) -> str:
    """The part of a script that is also a cell."""
    return script.read_text().partition("# The cell:")[2].partition("# After the cell:")[0]


def torchrun(script: Path, ranks: int, *arguments: str) -> str:
    """Run a script under torchrun and return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}",
               "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script), *arguments]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"torchrun {script.name} failed:\n{done.stderr[-3000:]}"
        raise RuntimeError(message)
    return done.stdout


def main(measure: Callable[[bool], list[Row]], about: str) -> None:
    """The command line of one benchmark."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="a first look: fewer repeats and ranks")
    print(machine())
    print(table(measure(parser.parse_args().quick)))
