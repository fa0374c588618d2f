"""Sends cells to the ranks, one at a time, and brings them to an end: finished, failed, stopped or out of time."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

from ddl_magics import debugging, ladder, verdict
from ddl_magics.deaths import Deaths
from ddl_magics.errors import BusyError, UsageError
from ddl_magics.health import Health
from ddl_magics.protocol import CellRequest, Sample
from ddl_magics.running import RunningCell
from ddl_magics.strategies import spec as specs
from ddl_magics.telemetry.history import History, RankInfo, RunInfo
from ddl_magics.telemetry.spool import Spool
from ddl_magics.views import table
from ddl_magics.views.fold import Folder, Mode
from ddl_magics.views.panel import Panel
from ddl_magics.views.ranges import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddl_magics.cluster.cluster import Cluster
    from ddl_magics.cluster.ipp import CellStream, Message
    from ddl_magics.parsing import CellOptions
    from ddl_magics.telemetry.runs import Runs
    from ddl_magics.views.screen import Screen


class Cells:
    """The cells of one cluster."""

    def __init__(self, cluster: Cluster, runs: Runs) -> None:
        self.cluster = cluster
        self.runs = runs
        self.spool = Spool(cluster.folder.output)
        self.deaths = Deaths(cluster, self.spool)
        self.health = Health(cluster, self.deaths)
        self.running: RunningCell | None = None
        self.background: threading.Thread | None = None
        self.background_error: BaseException | None = None
        self._by_stream: dict[int, RunningCell] = {}
        self._serial = 0
        self._late_messages: queue.SimpleQueue[tuple[CellStream, Message] | None] = queue.SimpleQueue()
        threading.Thread(target=self._show_late, name="ddl late output", daemon=True).start()
        cluster.client.on_telemetry = self._telemetry
        cluster.client.on_late = self._late

    # What the client's IO thread calls; it must not raise and not block.

    def _telemetry(self, content: dict[str, Any]) -> None:
        running = self.running
        if running and content.get("run") == running.request.run:
            running.samples.put(Sample.from_wire(content))

    def _late(self, stream: CellStream, message: Message) -> None:
        self._late_messages.put((stream, message))

    def _show_late(self) -> None:
        """Show what threads of cells print after their cell has ended, in a thread, until `close`."""
        while (late := self._late_messages.get()) is not None:
            stream, message = late
            cell = self._by_stream.get(id(stream))
            if cell:
                cell.late(message)

    def close(self) -> None:
        """Let go of the cluster, which has ended."""
        self._late_messages.put(None)
        self.spool.close()

    # One cell.

    def check_ready(self) -> None:
        """Raise what stands in the way of a cell: dead ranks, or another cell."""
        self.deaths.check()
        if self.background:
            raise BusyError("A cell runs in the background", "%ddl wait waits for it, and Stop during that ends it")
        running = self.running
        if running and not running.done:
            running.pump()  # a cell that was given up may have ended meanwhile
        if running and not running.done:
            raise BusyError(
                f"{in_words(running.waiting)} did not end the cell In[{running.request.cell}]",
                "%ddl restart ends the cell",
            )
        self.running = None

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
                    checkpoint_activations=options.checkpoint_activations,
                    steps=options.steps,
                    seed=options.seed,
                    timeout=options.timeout,
                    keep_frames=options.keep_frames,
                    part=part,
                    parts=len(checked),
                )
            )
        return requests

    def run(
        self,
        requests: Sequence[CellRequest],
        options: CellOptions,
        line: str,
        screen: Screen,
        listener: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        """Run the requests one after the other; raises what the first that fails ends with.

        `listener` gets what rank 0 tells of a chat.
        """
        begun: list[str] = []
        try:
            with self.deaths.spoken_for(screen):
                for request in requests:
                    self.health.mend(screen, within=bool(begun))
                    begun.append(request.run)
                    self._end(self._start(request, options, line, screen, listener))
        finally:
            rows = self.runs.rows(begun) if len(requests) > 1 else []
            if rows:
                table.show_runs(rows, screen)

    def in_background(self, work: Callable[[], None], screen: Screen) -> None:
        """Call `work` in a thread; what it raises is shown, and raised again by `wait`."""
        self.background_error = None

        def follow() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - kept for `wait`, and shown now
                self.background_error = error
                screen.write("stderr", in_text(error) + "\n")
            finally:
                self.background = None

        self.background = threading.Thread(target=follow, name="ddl cell", daemon=True)
        self.background.start()

    def wait(self, screen: Screen) -> None:
        """Wait for the cell in the background, raise what it ended with; Stop stops it, a breakpoint opens a prompt."""
        while (thread := self.background) is not None:
            try:
                thread.join(0.1)
                if self.running and self.running.stopped and self.running.screen.kind != "headless":
                    debugging.converse_beside(self.running, None, screen)
            except KeyboardInterrupt:
                if self.running:
                    self.running.presses += 1
        error, self.background_error = self.background_error, None
        if error:
            raise error

    def _start(
        self,
        request: CellRequest,
        options: CellOptions,
        line: str,
        screen: Screen,
        listener: Callable[[dict[str, Any]], object] | None,
    ) -> RunningCell:
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
                checkpoint_activations=request.checkpoint_activations,
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
            folder=folder_for(screen, ranks, options.output),
            panel=Panel(history, screen, quiet=not options.panel),
            listener=listener,
            mended_after=self.health.mended_after,
        )
        self._by_stream[id(stream)] = self.running
        for old in list(self._by_stream)[:-64]:
            del self._by_stream[old]
        return self.running

    def _end(self, running: RunningCell) -> None:
        """Follow a cell to its end; raises what it ends with, if not well."""
        stopped = ladder.follow(running)
        with ladder.presses_counted(running):
            outcomes = running.finish()
        self.health.note(running.request, outcomes, running.untold)
        if running.done:
            self.running = None
        if self.spool.failed:
            running.screen.write("stderr", self.spool.failed + "\n")
        if running.history.has_metrics:
            self.runs.add(running.history)
        if self.deaths.over():
            self.running = None
            raise self.deaths.error()
        error = verdict.error_of(outcomes, stopped, running)
        if error:
            raise error


def in_text(error: BaseException) -> str:
    """What IPython would show of an error of ours."""
    render = getattr(error, "_render_traceback_", None)
    return "\n".join(render()) if render else f"{type(error).__name__}: {error}"


def folder_for(screen: Screen, ranks: list[int], mode: Mode) -> Folder:
    """Fold as the screen can show: nothing is redrawn where nobody looks, and a terminal has a width."""
    width = shutil.get_terminal_size().columns if screen.kind == "terminal" else None
    return Folder(ranks, mode=mode, live=screen.kind != "headless", width=width)


def with_magic_line(code: str, line: str) -> str:
    """The code as the ranks run it: with the magic's line as a comment, so that line numbers are the notebook's.

    A cell that begins with a magic of its own must begin with it there too.
    """
    return code if code.lstrip().startswith("%%") else f"# %%ddl {line}".rstrip() + "\n" + code
