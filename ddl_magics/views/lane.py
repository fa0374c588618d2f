"""One rank's output on its way to the screen: lines in order, then what a flood left out, then the open row.

A lane holds a bounded number of lines. When it is full the flood begins: later lines are only counted and the last few
of them kept, until the flood is closed; they all are in the spool.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from ddl_magics.views.rows import Redrawn, RowReader

PROGRESS = re.compile(r"\d+%|\d+/\d+|it/s|s/it")
TIMING = re.compile(r"\d+(?::\d\d)+|[\d.?]+ ?(?:it/s|s/it)")
"""What differs between the bars of ranks that do the same: times and rates."""
SHAPE = re.compile(r"[\d.,:?#=\s█▏▎▍▌▋▊▉>-]+|it/s|s/it")
"""What changes from one update of a bar to the next."""
PERCENT = re.compile(r"(\d+(?:\.\d+)?)%|(\d+)/(\d+)")


class Line(NamedTuple):
    """A finished line, or what is open of one."""

    name: str
    text: str
    key: tuple[str, str]
    """Lines of several ranks with the same key are shown once."""
    time: float


@dataclass(frozen=True)
class OpenRow:
    """A row that is not finished yet."""

    rank: int
    name: str
    text: str
    redrawn: bool
    since: float

    @property
    def shape(self) -> tuple[str, str]:
        """Bars of the same loop have the same shape whatever they stand at."""
        if self.redrawn and PROGRESS.search(self.text):
            return ("shape", SHAPE.sub("", self.text))
        return (self.name, self.text)

    @property
    def done(self) -> float:
        """How far a bar is, 0 to 1, as far as its text tells."""
        match = PERCENT.search(self.text)
        if match is None:
            return 0.0
        return float(match[1]) / 100 if match[1] else int(match[2]) / max(int(match[3]), 1)


class Lane:
    """The output of one rank.

    Parameters
    ----------
    rank
        Its rank.
    room
        Lines that wait for the screen before a flood begins.
    tail
        Lines kept of the end of a flood.
    """

    def __init__(self, rank: int, room: int, tail: int) -> None:
        self.rank = rank
        self.ended = False
        self.queue: deque[Line] = deque()
        self.keys: Counter[tuple[str, str]] = Counter()
        """How often each key is in the queue."""
        self.skipped = 0
        """Lines of the flood, those in `tail` included."""
        self.tail: deque[Line] = deque(maxlen=tail)
        self.skipped_at = 0.0
        self._room = room
        self._readers = {"stdout": RowReader(), "stderr": RowReader()}
        self._since = dict.fromkeys(self._readers, 0.0)

    def feed(self, name: str, text: str, now: float) -> None:
        reader = self._readers[name]
        was_open = bool(reader.open)
        self._take(name, reader.feed(text), now)
        if not was_open or "\n" in text:
            self._since[name] = now

    def finish_rows(self, now: float) -> None:
        """End the open rows: they become lines."""
        for name, reader in self._readers.items():
            self._take(name, reader.finish(), now)

    def open_rows(self) -> list[OpenRow]:
        """The rows that are open, once all lines before them are on the screen."""
        if self.queue or self.skipped:
            return []
        return [
            OpenRow(self.rank, name, reader.open, reader.redrawn, self._since[name])
            for name, reader in self._readers.items()
            if reader.open
        ]

    def pop(self) -> Line:
        line = self.queue.popleft()
        self.keys[line.key] -= 1
        if not self.keys[line.key]:
            del self.keys[line.key]
        return line

    def squeeze(self) -> None:
        """Move all that waits into the flood: only its end will be shown."""
        waiting = [*self.queue, *self.tail]
        self.skipped += len(self.queue)
        self.queue.clear()
        self.keys.clear()
        self.tail.clear()
        self.tail.extend(waiting)

    def close_flood(self) -> None:
        """The flood is over: its last lines go on to the screen."""
        self.queue.extend(self.tail)
        self.keys.update(line.key for line in self.tail)
        self.tail.clear()
        self.skipped = 0

    @property
    def folded(self) -> int:
        """Lines of the flood that nobody will see."""
        return self.skipped - len(self.tail)

    def _take(self, name: str, lines: list[str], now: float) -> None:
        if not lines:
            return
        room = 0 if self.skipped else max(0, self._room - len(self.queue))
        for text in lines[:room]:
            line = Line(name, text, _key(name, text), now)
            self.queue.append(line)
            self.keys[line.key] += 1
        if flood := len(lines) - room:
            if flood < 0:
                return
            self.skipped += flood
            self.skipped_at = now
            kept = lines[max(room, len(lines) - (self.tail.maxlen or 0)) :]
            self.tail.extend(Line(name, text, _key(name, text), now) for text in kept)


def _key(name: str, text: str) -> tuple[str, str]:
    if isinstance(text, Redrawn) and PROGRESS.search(text):
        return (name, TIMING.sub("~", text))
    return (name, text)
