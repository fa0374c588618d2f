"""One cell in flight, as the notebook sees it: messages of the ranks in, output and picture out."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddl_magics.protocol import CHAT, CellRequest, Outcome, Sample
from ddl_magics.views.rich_output import RichOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.cluster.cluster import Cluster
    from ddl_magics.cluster.ipp import CellStream, Message
    from ddl_magics.telemetry.history import History
    from ddl_magics.telemetry.spool import Spool
    from ddl_magics.views.fold import Folder
    from ddl_magics.views.panel import Panel
    from ddl_magics.views.screen import Screen

TICK = 0.05
"""Seconds that the notebook waits for messages before it looks at the clock."""

DEATH_S = 1.5
"""Seconds after a rank's death in which MPI takes the others down; they are not taken for the cause."""


@dataclass
class RunningCell:
    """A cell that runs on ranks; `pump` until `done`, then `outcomes`."""

    cluster: Cluster
    request: CellRequest
    stream: CellStream
    screen: Screen
    spool: Spool
    history: History
    folder: Folder
    panel: Panel | None
    listener: Callable[[dict[str, Any]], object] | None = None
    """Gets what rank 0 tells of a chat, see `protocol.CHAT`."""
    mended_after: int = 0
    """The cell after which the process group was made anew last; 0: it is the first one."""
    samples: queue.SimpleQueue[Sample] = field(default_factory=queue.SimpleQueue)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    idle: set[int] = field(default_factory=set)
    """Ranks whose output is complete."""
    latest: dict[int, Sample] = field(default_factory=dict)
    """The last record of each rank."""
    in_vain: str = ""
    """Who waited for ranks that could not come any more, and was freed."""
    presses: int = 0
    """How often Stop was pressed since the cell began, where that raises no KeyboardInterrupt."""
    stopping: bool = False
    """The ladder has begun."""
    places: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Where the ranks were when the cell was stopped."""
    stops: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What each rank said that stopped at a breakpoint: file, line, and the debugger's text."""
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The last answer of each rank to a debugger command, with the number of that command."""
    commands: int = 0
    """Debugger commands so far."""
    news: int = 0
    """Messages so far."""
    _dead_since: float | None = None

    def __post_init__(self) -> None:
        self.rich = RichOutput(self.screen, self.stream.ranks)

    @property
    def waiting(self) -> list[int]:
        """Ranks that have not ended the cell."""
        return [rank for rank in self.stream.ranks if rank not in self.idle]

    @property
    def done(self) -> bool:
        """Whether every rank has ended the cell and all its output is here, or the ranks are dead."""
        return not self.waiting

    @property
    def stopped(self) -> dict[int, dict[str, Any]]:
        """Ranks that are stopped at a breakpoint, the first that stopped first, with what they said."""
        return {rank: stop for rank, stop in list(self.stops.items()) if rank not in self.idle}

    @property
    def untold(self) -> list[int]:
        """Ranks that have not told how the cell ended."""
        return [rank for rank in self.stream.ranks if rank not in self.outcomes]

    @property
    def failed(self) -> list[Outcome]:
        """Outcomes of ranks that failed by themselves, the first in time first."""
        wrong = {"error"} if self.stopping else {"error", "interrupted"}  # a program may interrupt itself
        failed = [outcome for outcome in self.outcomes.values() if outcome.status in wrong]
        return sorted(failed, key=lambda outcome: (outcome.failed_at or 0.0, outcome.rank))

    def since_failure(self) -> float:
        """Seconds since the first rank failed; negative where none has."""
        return time.time() - (self.failed[0].failed_at or 0.0) if self.failed else -1.0

    def out_of_time(self) -> bool:
        """Whether the cell has run for longer than it may."""
        limit = self.request.timeout
        return bool(limit) and time.monotonic() - self.started > (limit or 0.0) and not self.done

    def some_wait(self) -> bool:
        """Whether a rank said in its last record that it waits in a collective."""
        return any(rank in self.latest and self.latest[rank].waiting for rank in self.waiting)

    def pump(self) -> None:
        """Take what has arrived and show it; waits at most TICK."""
        for message in self.stream.drain(TICK):
            self._take(message)
        self._take_samples()
        self._notice_dead()
        self._show(final=False)

    def _take(self, message: Message) -> None:
        rank, kind, content = message
        self.news += 1
        if kind == "stream":
            self.spool.write(rank, self.request.cell, content["name"], content["text"])
            self.folder.feed(rank, content["name"], content["text"])
        elif kind == "ddl_stopped":
            self.stops[rank] = content
        elif kind in {"ddl_debug", "ddl_resumed"}:
            self.answers[rank] = content
            if kind == "ddl_resumed":
                self.stops.pop(rank, None)
        elif kind == "error":
            self.spool.write(rank, self.request.cell, "traceback", "\n".join(content["traceback"]) + "\n")
        elif kind == "ddl_outcome":
            self.outcomes[rank] = Outcome.from_wire(content["outcome"])
            self.samples.put(Sample.from_wire(content["sample"]))
        elif kind == CHAT:
            if self.listener is not None:
                self.listener(content)
        elif kind == "idle":
            self.idle.add(rank)
            self.folder.ended(rank)
        else:
            self.rich.take(rank, kind, content)

    def _take_samples(self) -> None:
        while not self.samples.empty():
            sample = self.samples.get()
            self.latest[sample.rank] = sample
            self.history.add(sample)

    def _notice_dead(self) -> None:
        """A rank's death resolves its reply with an error and sends no outcome."""
        for rank in self.waiting:
            if self.stream.engine_died(rank):
                self._dead_since = self._dead_since or time.monotonic()
                first = not any(outcome.status == "dead" for outcome in self.outcomes.values())
                self.idle.add(rank)
                self.outcomes[rank] = Outcome(rank, "dead", failed_at=time.time() if first else None)
        if self.cluster.ended():
            self._dead_since = self._dead_since or time.monotonic()
        if self._dead_since and time.monotonic() - self._dead_since > DEATH_S:
            self.idle |= set(self.waiting)

    def _show(self, *, final: bool) -> None:
        for name, text in self.folder.flush(time.monotonic(), final=final):
            self.screen.write(name, text)
        self.rich.flush(final=final)
        if self.panel and not final:
            self.panel.tick()

    def finish(self) -> list[Outcome]:
        """Show what is left and freeze the picture; outcomes by rank, missing where a rank does not answer."""
        self._take_samples()
        self.history.finish(list(self.outcomes.values()))
        self._show(final=True)
        if self.panel:
            self.panel.freeze()
        return [self.outcomes[rank] for rank in self.stream.ranks if rank in self.outcomes]

    def late(self, message: Message) -> None:
        """What a thread of the cell prints after the cell's end: kept, and shown where it belongs."""
        rank, kind, content = message
        if kind == "stream":
            self.spool.write(rank, self.request.cell, content["name"], content["text"])
            self.folder.feed(rank, content["name"], content["text"])
            for name, text in self.folder.flush(final=True):
                self.screen.write(name, text)

    def where(self, patience: float = 1.0) -> dict[int, dict[str, Any]]:
        """State by rank of those that have not ended the cell and answer out of band within `patience` seconds."""
        return self.cluster.client.answers("state", self.waiting, timeout=patience)

    def release(self, ranks: list[int], reason: str) -> None:
        """Close the collectives of ranks, without waiting for their answer."""
        self.cluster.client.ask("release", ranks, reason=reason, run=self.request.run)

    def say(self, text: str) -> None:
        """Put a line beside the cell's output."""
        self.screen.write("stderr", f"{text}\n")
