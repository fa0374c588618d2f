"""Sends cells to the ranks, one at a time, and brings them to an end: finished, failed, stopped or out of time."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ddl_magics import verdict
from ddl_magics.cluster.cluster import Cluster
from ddl_magics.cluster.ipp import CellStream, Message
from ddl_magics.errors import BusyError, CellError, CellInterrupted, UsageError
from ddl_magics.parsing import CellOptions
from ddl_magics.protocol import CellRequest, Sample
from ddl_magics.running import RunningCell
from ddl_magics.strategies import spec as specs
from ddl_magics.telemetry.history import History, RankInfo, RunInfo
from ddl_magics.telemetry.runs import Runs
from ddl_magics.telemetry.spool import Spool
from ddl_magics.views import table
from ddl_magics.views.fold import Folder
from ddl_magics.views.panel import Panel
from ddl_magics.views.ranges import in_words
from ddl_magics.views.screen import Screen

ANSWER_S = 2.0
"""Seconds that ranks have to answer an interrupt before they are named."""

GIVE_UP_S = 5.0
"""Seconds after that until the notebook stops waiting for them."""


class Cells:
    """The cells of one cluster."""

    def __init__(self, cluster: Cluster, runs: Runs) -> None:
        self.cluster = cluster
        self.runs = runs
        self.spool = Spool(cluster.folder.output)
        self.running: RunningCell | None = None
        self.background: threading.Thread | None = None
        self.background_error: BaseException | None = None
        self._by_stream: dict[int, RunningCell] = {}
        self._deaths: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._dead: list[int] = []
        self._serial = 0
        cluster.client.on_telemetry = self._telemetry
        cluster.client.on_leave = self._deaths.put
        cluster.client.on_late = self._late

    # What the client's IO thread calls; it must not raise and not block.

    def _telemetry(self, content: dict[str, Any]) -> None:
        running = self.running
        if running and content.get("run") == running.request.run:
            running.samples.put(Sample.from_wire(content))

    def _late(self, stream: CellStream, message: Message) -> None:
        cell = self._by_stream.get(id(stream))
        if cell:
            threading.Thread(target=cell.late, args=(message,), daemon=True).start()

    # One cell.

    def dead(self) -> list[int]:
        """Ranks whose process has ended, in the order in which that was noticed."""
        rank_of = {engine: rank for rank, engine in self.cluster.client.engine_of.items()}
        while not self._deaths.empty():
            engine = self._deaths.get()
            if engine in rank_of and rank_of[engine] not in self._dead:
                self._dead.append(rank_of[engine])
        return self._dead

    def check_ready(self) -> None:
        """Raise what stands in the way of a cell: dead ranks, or another cell."""
        if self.dead():
            raise verdict.death(self._dead[0], self.cluster.printed())
        running = self.running
        if running is None:
            return
        if self.background is None:
            running.pump()  # a cell that was given up may have ended meanwhile
        if running.done and self.background is None:
            self.running = None
            return
        msg = f"{in_words(running.waiting)} still in the cell In[{running.request.cell}]"
        raise BusyError(
            msg.replace(" still", f" {'is' if len(running.waiting) == 1 else 'are'} still"),
            "%ddl wait waits for it" if self.background else "%ddl restart ends it",
        )

    def requests(self, code: str, options: CellOptions, default: specs.StrategySpec, cell: int) -> list[CellRequest]:
        """One request for each strategy, checked against the world."""
        n = self.cluster.n
        outside = [rank for rank in options.ranks or () if rank >= n]
        if outside:
            msg = f"there is no {in_words(outside)}"
            raise UsageError(msg, f"The ranks are 0 to {n - 1}.")
        local = max(fact["local_size"] for fact in self.cluster.facts)
        checked = [specs.check(spec, n, local) for spec in options.strategies or (default,)]
        requests = []
        for part, spec in enumerate(checked):
            self._serial += 1
            requests.append(
                CellRequest(
                    code=code,
                    cell=cell,
                    run=f"{self.cluster.cluster_id}-{self._serial}",
                    name=" ".join(filter(None, [options.name, spec.text if len(checked) > 1 else ""])) or spec.text,
                    strategy=spec.text,
                    ranks=(0,) if spec.name == "single" else options.ranks,
                    precision=options.precision,
                    seed=options.seed,
                    timeout=options.timeout,
                    part=part,
                    parts=len(checked),
                )
            )
        return requests

    def run(self, requests: Sequence[CellRequest], options: CellOptions, line: str, screen: Screen) -> None:
        """Run the requests one after the other; raises what the first that fails ends with."""
        for request in requests:
            self.check_ready()
            self._start(request, options, line, screen)
            self._follow()
        if len(requests) > 1:
            table.show_runs(self.runs.rows([request.run for request in requests]), screen)

    def run_in_background(self, requests: Sequence[CellRequest], options: CellOptions, line: str, screen: Screen) -> None:
        """As `run`, in a thread; `wait` raises what it ends with."""
        self.check_ready()
        self.background_error = None

        def work() -> None:
            try:
                for request in requests:
                    self._start(request, options, line, screen)
                    self._follow()
                if len(requests) > 1:
                    table.show_runs(self.runs.rows([request.run for request in requests]), screen)
            except BaseException as error:  # noqa: BLE001 - kept for `wait`, and shown now
                self.background_error = error
                show = getattr(error, "_render_traceback_", lambda: [f"{type(error).__name__}: {error}"])
                screen.write("stderr", "\n".join(show()) + "\n")
            finally:
                self.background = None

        self.background = threading.Thread(target=work, name="ddl cell", daemon=True)
        self.background.start()

    def wait(self) -> None:
        """Wait for the cell in the background; Stop stops it. Raises what it ended with."""
        thread = self.background
        try:
            while thread and thread.is_alive():
                thread.join(0.1)
        except KeyboardInterrupt:
            running = self.running
            if running:
                self.cluster.client.signal(signal.SIGINT, running.waiting)
                thread.join(ANSWER_S + GIVE_UP_S)
        error, self.background_error = self.background_error, None
        if error:
            raise error

    def _start(self, request: CellRequest, options: CellOptions, line: str, screen: Screen) -> None:
        ranks = list(request.ranks) if request.ranks is not None else list(range(self.cluster.n))
        infos = [RankInfo(fact["rank"], fact["host"], fact["pid"], fact["device"])
                 for fact in self.cluster.facts if fact["rank"] in ranks]  # fmt: skip
        history = History(
            RunInfo(
                run=request.run,
                name=request.name,
                strategy=request.strategy,
                world_size=len(ranks),
                nodes=self.cluster.facts[0]["nodes"],
                cell=request.cell,
                started=time.time(),
                precision=request.precision,
            ),
            infos,
        )
        stream = self.cluster.client.run_cell(request, ranks, with_magic_line(request.code, line))
        self.running = RunningCell(
            cluster=self.cluster,
            request=request,
            stream=stream,
            screen=screen,
            spool=self.spool,
            history=history,
            folder=Folder(ranks, mode=options.output),
            panel=Panel(history, screen) if options.panel else None,
        )
        self._by_stream[id(stream)] = self.running
        for old in list(self._by_stream)[:-64]:
            del self._by_stream[old]

    def _follow(self) -> None:
        """Bring the running cell to its end, by the ladder where the user or the clock stops it."""
        running = self.running
        assert running is not None  # noqa: S101 - set by _start
        stopped: BaseException | None = None
        try:
            while not running.done:
                running.pump()
                if running.request.timeout and time.monotonic() - running.started > running.request.timeout:
                    raise TimeoutError
        except (KeyboardInterrupt, TimeoutError) as error:
            stopped = error
        where = self._stop(running) if stopped and not running.done else ""
        outcomes = running.finish()
        if running.history.has_metrics:
            self.runs.add(running.history)
        if running.done:
            self.running = None
        if isinstance(stopped, TimeoutError):
            msg = f"the cell was stopped after {running.request.timeout:g} s"
            raise CellError(msg, where or "Give it more by --timeout") from None
        if stopped or any(outcome.status == "interrupted" for outcome in outcomes):
            raise CellInterrupted(where or "the cell was stopped on every rank") from None
        self.dead()
        error = verdict.error_of(outcomes, self.cluster.printed(), labelled=len(running.stream.ranks) > 1)
        if error:
            raise error

    def _stop(self, running: RunningCell) -> str:
        """Interrupt the ranks; what to say of those that do not answer."""
        say: Callable[[str], None] = lambda text: running.screen.write("stderr", text + "\n")  # noqa: E731
        say(f"interrupting {in_words(running.waiting)} ...")
        for patience in (ANSWER_S, GIVE_UP_S):
            self.cluster.client.signal(signal.SIGINT, running.waiting)
            deadline = time.monotonic() + patience
            try:
                while not running.done and time.monotonic() < deadline:
                    running.pump()
            except KeyboardInterrupt:
                say("a second interrupt: no longer waiting")
                break
            if running.done:
                return ""
        for rank, state in sorted(running.where().items()):
            line = f"line {state['line']}: {state['source']}" if state["line"] else "no line of the cell"
            say(f"rank {rank} does not answer, since {state['seconds']:.0f} s at {line}")
        return f"{in_words(running.waiting)} did not stop; %ddl restart ends them"


def with_magic_line(code: str, line: str) -> str:
    """The code as the ranks run it: with the magic's line as a comment, so that line numbers are the notebook's.

    A cell that begins with a magic of its own must begin with it there too.
    """
    return code if code.lstrip().startswith("%%") else f"# %%ddl {line}".rstrip() + "\n" + code

