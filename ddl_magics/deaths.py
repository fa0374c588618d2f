"""Notices that ranks have died, or that somebody ended the cluster, and says so once, also while nothing runs.

A cell or an errand that is under way fails with the error; otherwise a thread writes it under the last cell. Nannies
tell of a rank within a few hundredths of a second, the launcher's end is seen as soon; what MPI's launcher knows of the
signal is waited for, since without it the cause stays dark.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ddl_magics.cluster import endings
from ddl_magics.cluster.oom import OutOfMemory
from ddl_magics.errors import RankDiedError
from ddl_magics.views.ranges import in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from ddl_magics.cluster.cluster import Cluster
    from ddl_magics.cluster.endings import Ending
    from ddl_magics.telemetry.spool import Spool
    from ddl_magics.views.screen import Screen

LOOK_S = 0.2
"""Seconds between two looks."""

LAST_WORDS_S = 3.0
"""Seconds that a launcher has, after a rank's death, to end the others and say what it saw."""

LAST_LINES = 3
"""Lines of what the rank printed last that are shown."""

DRAWING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Deaths:
    """Of the ranks of one cluster.

    Parameters
    ----------
    cluster
        Whose ranks are up.
    spool
        What they have printed.
    screen
        Where to write; replaced by that of each cell.
    """

    def __init__(self, cluster: Cluster, spool: Spool, screen: Screen | None = None) -> None:
        self._cluster = cluster
        self._spool = spool
        self.screen = screen
        self._left: SimpleQueue[int] = SimpleQueue()
        self._dead: list[int] = []
        self._told = False
        self._message = ""
        self._last: tuple[str, list[str]] = ("", [])
        self._spoken_for: set[object] = set()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._memory = OutOfMemory([fact["pid"] for fact in cluster.facts])
        cluster.client.on_leave = self._left.put
        threading.Thread(target=self._watch, name="ddl deaths", daemon=True).start()

    def close(self) -> None:
        """The cluster will be ended by the notebook itself: nothing is to be noticed any more."""
        self._closed.set()

    # What has happened.

    def dead(self) -> list[int]:
        """Ranks whose process has ended, in the order in which that was noticed."""
        with self._lock:
            rank_of = {engine: rank for rank, engine in self._cluster.client.engine_of.items()}
            while not self._left.empty():
                engine = self._left.get()
                if engine in rank_of and rank_of[engine] not in self._dead:
                    self._dead.append(rank_of[engine])
            return self._dead

    def over(self) -> bool:
        """Whether the cluster can no longer be used."""
        return bool(self._message) or bool(self.dead()) or self._cluster.ended()

    def check(self) -> None:
        """Raise RankDiedError where the cluster can no longer be used."""
        if self.over():
            raise self.error()

    def error(self) -> RankDiedError:
        """What to say of it: at length the first time, in one line after."""
        with self._lock:
            first, self._told = not self._told, True
            if not self._message:
                self._message, self._last = self._find_out()
            title, lines = self._last if first else ("", [])
            return RankDiedError(self._message, "%ddl restart starts them again", title, lines)

    @contextmanager
    def spoken_for(self, screen: Screen | None = None) -> Iterator[None]:
        """Within it, whoever works with the ranks raises the error itself; `screen` is where they write."""
        self.screen = screen or self.screen
        who = object()
        self._spoken_for.add(who)
        try:
            yield
        finally:
            self._spoken_for.discard(who)

    def await_answers(self, futures: Iterable[Future[Any]]) -> None:
        """Wait until all are there. Raises RankDiedError when a rank dies before that, or has given none."""
        with self.spoken_for():
            while not all(future.done() for future in futures):
                self.check()
                time.sleep(0.005)
            self.check()

    def _watch(self) -> None:
        """Tell of a death that nobody else tells of, in a thread."""
        while not self._closed.wait(LOOK_S):
            if not self.over():
                self._memory.note()
            elif not self._spoken_for:
                with self._lock:
                    told = self._told
                    text = "" if told else "\n".join(self.error().shown())
                if text and self.screen and not self._closed.is_set():
                    self.screen.write("stderr", f"{text}\n")
                if told or text:
                    return

    # Why.

    def _find_out(self) -> tuple[str, tuple[str, list[str]]]:
        """The message, and under which title which lines the rank printed last."""
        ending = self._await_ending()
        lost = "variables on the ranks are lost"
        cluster, dead = self._cluster, self.dead()
        if cluster.folder.stopped:
            return f"the ranks were stopped from outside this notebook, by ddl-magics stop; {lost}", ("", [])
        if ending is None:
            ended = self._ended_from_outside()
            return f"{ended or f'{in_words(dead)} died'}; {lost}", ("", [])
        rank = dead[0] if ending.rank is None and dead else ending.rank or 0
        evidence = self._memory.evidence(cluster.facts[rank]["pid"]) if ending.signal == signal.SIGKILL else ""
        how = f"rank {rank} died ({ending.in_words(evidence)})"
        lines = [line for text in self._spool.tail(rank).splitlines() if (line := _plain(text))][-LAST_LINES:]
        return f"{how}; {self._of_the_others(rank)}", (f"rank {rank} printed last:", lines)

    def _of_the_others(self, rank: int) -> str:
        others = [fact["rank"] for fact in self._cluster.facts if fact["rank"] != rank]
        if not others:
            return "its variables are lost"
        if self._cluster.mpi:
            return f"MPI ended {in_words(others)} with it, and variables on the ranks are lost"
        live = "lives on, but cannot" if len(others) == 1 else "live on, but cannot"
        return f"{in_words(others)} {live} go on without it, and variables on the ranks are lost"

    def _await_ending(self) -> Ending | None:
        """How the first rank ended; waits until the launcher has said so or has ended."""
        deadline = time.monotonic() + LAST_WORDS_S
        while True:
            ended = self._cluster.ended() or self._cluster.folder.stopped
            ending = endings.find(self._cluster, self.dead())
            if ending or ended or time.monotonic() > deadline:
                return ending
            time.sleep(0.02)

    def _ended_from_outside(self) -> str:
        """Which part of the cluster somebody else ended; empty where none."""
        ipp = self._cluster.ipp
        for part, name, means in (
            (ipp.engine_set, "the launcher of the ranks was ended", "and they with it"),
            (ipp.controller, "the controller of the ranks was ended", "and they cannot be reached"),
        ):
            if part is not None and part.state == "after":
                code = (part.stop_data or {}).get("exit_code")
                how = f" ({endings.of_exit_code(code).in_words()})" if isinstance(code, int) and code < 0 else ""
                return f"{name} from outside this notebook{how}, {means}"
        return "the ranks were ended from outside this notebook" if self._cluster.ended() else ""


def _plain(line: str) -> str:
    """A line as it stands on a screen at the end: the last of what was written over it, without colours."""
    return DRAWING.sub("", line.rstrip().rpartition("\r")[2]).rstrip()
