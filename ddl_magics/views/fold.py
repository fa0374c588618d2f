r"""The streaming output of N ranks as one text: equal lines once, with the ranks that share them.

`feed` takes what the ranks print, `flush` gives what the screen should show next. A line waits a moment for its twins
of other ranks; the order of each rank's lines is always kept. What is not finished (a progress bar, a prompt) is drawn
in place at the end of the output: one row, redrawn with `\r`, that gives way to every finished line. A flood shows
its beginning and its end. What is left out here is in the spool.
"""

from __future__ import annotations

import time
from threading import Lock
from typing import TYPE_CHECKING, Literal

from ddl_magics.views.inplace import InPlace
from ddl_magics.views.lane import Lane, Line
from ddl_magics.views.ranges import in_words, ranges

if TYPE_CHECKING:
    from collections.abc import Iterable

Mode = Literal["fold", "rank0", "all"]

BURST = 2_000
"""Lines of about 200 characters that may reach the screen at once."""
RATE = 20.0
"""Such lines a second after that."""
MOST = 10_000
"""Lines of one cell after which the rate is `SLOW`: a notebook must stay a file that opens."""
SLOW = 1.0
REDRAWN = 0.2
"""Seconds between two drawings of the row that is not finished."""
CALM = 1.0
"""Seconds without a line too many after which a flood is over."""


class Folder:
    """What the screen shows of a cell's output.

    Parameters
    ----------
    ranks
        The ranks that run the cell.
    mode
        `fold`; `rank0`, the lowest rank alone; `all`, every line under its own rank.
    head, tail
        Lines of a rank that a flood shows at its beginning and end (fewer with very many ranks).
    patience
        Seconds for which a line waits for its twins.
    grace
        Seconds after which a row without a newline is shown.
    live
        Draw unfinished rows in place. False where nothing can be redrawn: a log file, a notebook without a reader.
    width
        Columns of the terminal, None where lines wrap by themselves.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        mode: Mode = "fold",
        *,
        head: int = 800,
        tail: int = 200,
        patience: float = 0.2,
        grace: float = 0.5,
        live: bool = True,
        width: int | None = None,
    ) -> None:
        self.ranks = sorted(ranks)
        self.mode = mode
        self._patience = patience
        self._grace = grace
        self._live = live
        count = max(len(self.ranks), 1)
        self._lanes = {
            rank: Lane(rank, room=max(100, min(head, 40_000 // count)), tail=max(10, min(tail, 4_000 // count)))
            for rank in self.ranks
        }
        self._shown = self.ranks[:1] if mode == "rank0" else self.ranks
        self._labels = len(self._shown) > 1
        self._tokens = float(BURST)
        self._spent = 0.0
        self._refilled: float | None = None
        self._inplace = InPlace(width)
        self._state: list[tuple[str, str]] = []
        self._drawn = float("-inf")
        self._lock = Lock()

    def feed(self, rank: int, name: str, text: str, now: float | None = None) -> None:
        """What a rank printed. Ranks that are not of this cell are ignored."""
        if rank not in self._lanes or (self.mode == "rank0" and rank not in self._shown):
            return
        with self._lock:
            stream = "stderr" if name == "stderr" else "stdout"
            self._lanes[rank].feed(stream, text, time.monotonic() if now is None else now)

    def ended(self, rank: int) -> None:
        """Say that a rank's cell has ended: nobody waits for its lines any more."""
        if rank in self._lanes:
            self._lanes[rank].ended = True

    def flush(self, now: float | None = None, *, final: bool = False) -> list[tuple[str, str]]:
        """What to show now, as (stream, text). `final`: everything, open rows as lines."""
        now = time.monotonic() if now is None else now
        with self._lock:
            self._refill(now)
            lanes = [self._lanes[rank] for rank in self._shown]
            if final:
                for lane in lanes:
                    lane.finish_rows(now)
            lines = self._match(lanes, now, hurry=final, spend=True)
            if final:
                if any(lane.queue for lane in lanes):
                    for lane in lanes:
                        lane.squeeze()
                lines += self._close_floods(lanes)
                lines += self._match(lanes, now, hurry=True, spend=False)
            else:
                flooded = [lane for lane in lanes if lane.skipped]
                if flooded and all(not lane.queue and now - lane.skipped_at >= CALM for lane in flooded):
                    lines += self._close_floods(flooded)
                    lines += self._match(lanes, now, hurry=False, spend=True)
            if final or not self._live:
                return self._inplace.compose(lines, [])
            if lines or now - self._drawn >= REDRAWN:
                self._drawn = now
                self._state = self._unfinished(lanes, now)
            return self._inplace.compose(lines, self._state)

    def _refill(self, now: float) -> None:
        if self._refilled is not None:
            rate = RATE if self._spent < MOST else SLOW
            self._tokens = min(float(BURST), self._tokens + rate * (now - self._refilled))
        self._refilled = now

    def _match(self, lanes: list[Lane], now: float, *, hurry: bool, spend: bool) -> list[tuple[str, str]]:
        """Take lines off the lanes, equal ones together, as far as they need not wait."""
        out: list[tuple[str, str]] = []
        while not spend or self._tokens >= 1:
            groups: dict[object, list[Lane]] = {}
            for lane in lanes:
                if lane.queue:
                    head = lane.queue[0]
                    groups.setdefault((head.key, lane.rank) if self.mode == "all" else head.key, []).append(lane)
            if not groups:
                return out
            ready = [g for g in groups.values() if self._ready(g, lanes, now, hurry=hurry)]
            if not ready:
                oldest = min(groups.values(), key=lambda g: g[0].queue[0].time)
                if not hurry and now - oldest[0].queue[0].time < self._patience:
                    return out
                # Each waits for a line that another holds further back (A B against B A): the oldest goes first.
                ready = [oldest]
            for group in ready:
                if spend and self._tokens < 1:
                    break
                line, *_twins = [lane.pop() for lane in group]
                out.append((line.name, self._labelled(group, line)))
                cost = 1 + len(line.text) / 200
                self._tokens -= cost if spend else 0
                self._spent += cost
        return out

    def _ready(self, group: list[Lane], lanes: list[Lane], now: float, *, hurry: bool) -> bool:
        """Whether a group of equal first lines may be shown: no other rank will soon come to the same line."""
        if self.mode == "all" or len(group) == len(lanes):
            return True
        line = group[0].queue[0]
        inside = {lane.rank for lane in group}
        if any(line.key in lane.keys for lane in lanes if lane.rank not in inside):
            return False
        if hurry or all(lane.ended for lane in lanes if lane.rank not in inside):
            return True
        return now - min(lane.queue[0].time for lane in group) >= self._patience

    def _labelled(self, group: list[Lane], line: Line) -> str:
        if not self._labels:
            return f"{line.text}\n"
        label = f"[{ranges(lane.rank for lane in group)}]"
        return f"{label} {line.text}\n" if line.text else f"{label}\n"

    def _close_floods(self, lanes: list[Lane]) -> list[tuple[str, str]]:
        """The line that says what was left out, and the last lines back on their lanes."""
        folded = {lane.rank: lane.folded for lane in lanes if lane.folded > 0}
        for lane in lanes:
            lane.close_flood()
        if not folded:
            return []
        return [("stdout", f"... {self._count(folded)} folded: %ddl log shows all ...\n")]

    def _count(self, folded: dict[int, int]) -> str:
        """`99,000 lines`, or with several ranks `99,000 lines of each of ranks 0-3`."""
        least, most = min(folded.values()), max(folded.values())
        if not self._labels:
            return f"{most:,} lines"
        number = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        return f"{number} lines of {'each of ' if len(folded) > 1 else ''}{in_words(folded)}"

    def _unfinished(self, lanes: list[Lane], now: float) -> list[tuple[str, str]]:
        """What to draw in place: floods that go on, then open rows, one entry for the ranks that are alike."""
        parts: list[tuple[str, str]] = []
        flooded = {lane.rank: lane.folded for lane in lanes if lane.folded > 0}
        if flooded:
            latest = next(lane.tail[-1].text for lane in lanes if lane.rank in flooded)
            parts.append(("stdout", f"... {self._count(flooded)} folded so far, now: {latest}"))
        rows = [row for lane in lanes for row in lane.open_rows() if row.redrawn or now - row.since >= self._grace]
        groups: dict[object, list[int]] = {}
        for at, row in enumerate(rows):
            groups.setdefault((row.shape, row.rank) if self.mode == "all" else row.shape, []).append(at)
        for members in groups.values():
            slowest = min((rows[at] for at in members), key=lambda row: (row.done, row.rank))
            label = f"[{ranges(rows[at].rank for at in members)}] " if self._labels else ""
            parts.append((slowest.name, label + slowest.text.lstrip("\r")))
        return parts
