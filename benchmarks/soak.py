"""Random cells in one notebook, good and bad, each with the verdict that is right for it: what goes wrong is counted.

Ranks raise, hang and die in turn. After each fault the next cell must run on all ranks, with the right sum, variables
kept and the prepared models of three strategies going on where they were (after a death: on new ranks). Measured are
the seconds from the fault, in Unix time on the rank, to its cause on the front end, and to the end of that next cell.
At the end everything is stopped, and what is left is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks import soak_cells
from benchmarks.measure import machine
from benchmarks.soak_notebook import Held, SoakNotebook
from benchmarks.soak_results import Result, held_table, table

if TYPE_CHECKING:
    from benchmarks.soak_cells import Cell, Kind
    from tests.notebook import Shown

CELL_S = 45.0
"""Seconds until a cell counts as frozen."""

START_S = 120.0

AFTER = (
    "%%ddl\nbatches = group = None\ntotal = torch.full((3,), rank + 1.0)\ndist.all_reduce(total)\n"
    "print('after: kept', before - rank, 'sum', total[0].item(), 'steps', told())"
)
"""The next cell."""

SUM = (
    "%%ddl\nimport torch, torch.distributed as dist\ntotal = torch.full((3,), rank + 1.0)\n"
    "dist.all_reduce(total)\nprint('sum', total[0].item())"
)
"""The next cell where a death has taken all variables."""


class Soak:
    """One run of it."""

    def __init__(self, n: int, seed: int, folder: Path) -> None:
        self.n, self.random = n, random.Random(seed)
        self.book = SoakNotebook(folder)
        self.results: list[Result] = []
        self.steps: dict[str, int] = {}
        self.pids: list[int] = []
        self.lived = 0
        """Cells since the ranks started last."""
        self.first: list[Held] = []
        """What each rank held then."""
        self.longest = 0
        """Cells that ranks lived at most."""
        self.held: dict[str, tuple[Held, Held]] = {}
        """First and last, of the kernel, and of the ranks that lived longest."""

    # The ranks' life.

    def start(self) -> None:
        """Bring up ranks with their models."""
        self._must(f"%ddl start -n {self.n} --device cpu --env OMP_NUM_THREADS=1", START_S)
        self._set_up()
        self.kernel = Held.by(self.book.pid)

    def _set_up(self) -> None:
        self._must(self.book.setup(), START_S)
        for name in soak_cells.STRATEGIES:
            self._must(f"%%ddl --strategy {name}\nprepare()", START_S)
        self._must("%%ddl -o pids\nos.getpid()", CELL_S)
        self.pids = self.book.value("pids")
        self.steps = dict.fromkeys(soak_cells.STRATEGIES, 0)
        self.lived = 0
        self._must(AFTER, CELL_S)  # what is made at the first step is there from then on
        self._stepped()
        self.first = [Held.by(pid) for pid in self.pids]

    def restart(self, result: Result, fault: float) -> None:
        """Bring back the ranks after a death, and see them work."""
        old = self.book.processes()
        restarted = self.book.run("%ddl restart", START_S)
        if restarted.ename:
            result.problems.append(f"%ddl restart: {restarted.evalue}")
        shown = self.book.run(SUM, CELL_S)
        if f"[0-{self.n - 1}] sum {self._sum()}" not in shown.stdout:
            result.problems.append(f"after the restart: {shown.text}")
        result.recovered = time.time() - fault
        left = old & self.book.processes() - {psutil.Process(self.book.pid)}
        if left:
            result.problems.append(f"processes of before the restart live: {left}")
        self._set_up()

    def _must(self, code: str, timeout: float) -> Shown:
        shown = self.book.run(code, timeout)
        if shown.ename:
            raise RuntimeError(f"{code}\n{shown.text}")
        return shown

    # One cell.

    def once(self) -> Result:
        """Draw a cell, run it, judge it, and run the next one."""
        lists, shares = zip(*soak_cells.SHARES, strict=True)
        kind: Kind = self.random.choice(self.random.choices(lists, shares)[0])
        cell = kind.drawn(self.random.randrange(self.n), self.n)
        result = Result(len(self.results) + 1, kind.row, cell.code)
        self.results.append(result)
        if kind.ending in {"dies", "killed"}:
            self.note_held()
        self.lived += 1
        try:
            fault = self._run(cell, result)
            if kind.ending in {"dies", "killed"}:
                self.restart(result, fault)
            elif kind.ending != "good":
                self._after(result, fault)
        except TimeoutError as error:
            result.problems.append(f"frozen: {error}")
            self._thaw(result)
        return result

    def _run(self, cell: Cell, result: Result) -> float:
        """Run it to its end; returns the moment of the fault."""
        kind = cell.kind
        if kind.ending == "killed":
            return self._kill(cell, result)
        sent = self.book.send(cell.code)
        pressed = 0.0
        if kind.ending == "stop":
            self.book.result(sent, CELL_S, until=lambda shown: f"[0-{self.n - 1}] here" in shown.stdout)
            time.sleep(self.random.uniform(0.0, 1.5))  # in whatever state that finds them
            pressed = time.time()
            self.book.interrupt()
        shown = self.book.result(sent, CELL_S)
        result.problems += cell.problems(shown)
        if kind.steps:
            self.steps[kind.steps] += 1
        if kind.ending == "good":
            return 0.0
        fault = pressed or self._fault(cell, shown)
        seen = self.book.seen(cell.notice())
        if seen is None:
            result.problems.append(f"never said {cell.notice()!r}")
        else:
            result.noticed = seen - fault
        return fault

    def _fault(self, cell: Cell, shown: Shown) -> float:
        """When it happened on the rank."""
        if cell.kind.ending == "timeout":
            began = next(when for when, text in self.book.arrivals if "here" in text)
            return began + soak_cells.TIMEOUT_S
        written = self.book.written()
        if not written:
            raise RuntimeError(f"no rank wrote down when it failed:\n{cell.code}\n{shown.text}")
        return written[-1] if cell.kind.ending == "in vain" else written[0]

    def _kill(self, cell: Cell, result: Result) -> float:
        """Kill a rank while nothing runs."""
        sent = self.book.send(cell.code)
        self.book.result(sent, CELL_S)
        time.sleep(self.random.uniform(0.0, 1.5))
        fault = time.time()
        psutil.Process(self.pids[cell.rank]).kill()
        self.book.late(sent, cell.notice(), CELL_S)
        result.noticed = time.time() - fault
        result.problems += cell.problems(self.book.run("%%ddl\n1", CELL_S))
        return fault

    def _after(self, result: Result, fault: float) -> None:
        """The next cell."""
        shown = self.book.run(AFTER, CELL_S)
        result.recovered = time.time() - fault
        told = f"after: kept 41 sum {self._sum()} steps {self._stepped()}"
        result.kept = f"[0-{self.n - 1}] {told}" in shown.stdout
        if not result.kept:
            result.problems.append(f"next cell: {shown.text.strip()!r} without {told!r}")
            self._count_anew(result)

    def _stepped(self) -> str:
        """What the ranks say of their steps after the next cell."""
        self.steps = {name: steps + 1 for name, steps in self.steps.items()}
        return ", ".join(f"{name} {steps} right" for name, steps in self.steps.items())

    def _count_anew(self, result: Result) -> None:
        """After a wrong verdict: take the steps from the ranks, so that the next cells are judged by themselves."""
        if self.book.run("%%ddl -o steps\nsteps", CELL_S).ename:
            self.restart(result, time.time())
        else:
            self.steps = self.book.value("steps")[0]

    def _sum(self) -> float:
        return self.n * (self.n + 1) / 2

    def _thaw(self, result: Result) -> None:
        """Say where a frozen cell is, and go on with new ranks, so that the run does not end here."""
        result.problems.append(self.book.where())
        self.book.interrupt()
        time.sleep(15)
        try:
            self.restart(result, time.time())
        except TimeoutError as error:
            raise RuntimeError(f"the notebook is frozen for good:\n{result.code}\n{error}") from error

    def note_held(self) -> None:
        """Compare what ranks hold, which are about to go, with their first moments, if they lived longest."""
        self._must("%%ddl\nimport gc\nbatches = group = plain = loss = hook = None\ngc.collect()", CELL_S)
        self.held["kernel"] = self.kernel, Held.by(self.book.pid)
        if self.lived >= self.longest:
            self.longest = self.lived
            last = [Held.by(pid) for pid in self.pids]
            self.held |= {f"rank {rank}": both for rank, both in enumerate(zip(self.first, last, strict=True))}

    def end(self) -> list[str]:
        """Stop everything; what is left, in words."""
        self.note_held()
        self._must("%ddl stop", CELL_S)
        left = self.book.processes() - {psutil.Process(self.book.pid)}
        left |= set(psutil.Process(self.book.pid).children())  # also those that nobody has waited for
        said = [f"{len(left)} processes after %ddl stop", f"{len(self.book.files())} files of clusters"]
        self.book.close()
        said.append(f"{len(self.book.processes())} processes after the kernel's end")
        return said


def run(cells: int, minutes: float, seed: int, n: int, log: Path | None = None) -> str:
    """Run a soak; its report.

    Parameters
    ----------
    cells
        How many.
    minutes
        Over which they are spread, with pauses, and after which no new one begins; 0: as fast as they go.
    seed
        Of the draw.
    n
        Number of ranks.
    log
        File for one JSON object a cell.
    """
    where, began = machine(), time.time()
    loads = []
    with ExitStack() as stack:
        soak = Soak(n, seed, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddl-soak-"))))
        stack.callback(soak.book.end_all)
        soak.start()
        for number in range(cells):
            if minutes and time.time() - began > minutes * 60:
                break
            time.sleep(max(0.0, began + number * minutes * 60 / cells - time.time()))
            result = soak.once()
            loads.append(os.getloadavg()[0])
            for problem in result.problems:
                print(f"WRONG in cell {result.number} ({result.row}):\n{result.code}\n{problem}\n", flush=True)
            if log:
                with log.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
        left = soak.end()
    taken = (time.time() - began) / 60
    load = f"load {min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}"
    about = f"{where}; {n} ranks, seed {seed}, {len(soak.results)} cells in {taken:.0f} minutes; {load}"
    holds = held_table(soak.held, soak.longest, len(soak.results))
    return f"{about}\n\n{table(soak.results)}\n\n{holds}\n\nLeft: {', '.join(left)}"


def report(*, quick: bool) -> str:
    """The part of `benchmarks.run`."""
    return run(12, 0, 1, 2) if quick else run(200, 30, 1, 2)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--cells", type=int, default=200, help="how many (200)")
    parser.add_argument("--minutes", type=float, default=30, help="over which they are spread (30); 0: no pauses")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (1)")
    parser.add_argument("-n", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--log", type=Path, help="a file for one JSON object a cell")
    given = parser.parse_args()
    print(run(given.cells, given.minutes, given.seed, given.n, given.log))


if __name__ == "__main__":
    main()
