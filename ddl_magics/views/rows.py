r"""From what a process prints, in pieces of any size, to finished lines and the row that is still open.

A row may be redrawn: `\r` goes back to its start, and only what stands there last is shown, as on a terminal. tqdm's
nested bars (`\n\r...\x1b[A`: down, draw, up again) are rows below the open one. Colours are closed at the end of each
line and opened again on the next one, because lines of other ranks may come between. Other control sequences pass.
"""

from __future__ import annotations

import re

LONGEST = 20_000
"""Characters of a line that reach the screen; the rest is counted."""
SGR = re.compile(r"\x1b\[([0-9;]*)m")
BELOW = re.compile(r"(\n+)\r([^\n]*?)((?:\x1b\[A)+)")
CLOSING = {"", "0", "00", "22", "23", "24", "27", "39", "49"}
"""SGR parameters that end a style."""


class Redrawn(str):
    r"""A line that was drawn over with `\r` before it ended: most likely a progress bar."""

    __slots__ = ()


class RowReader:
    """One stream of one rank."""

    def __init__(self) -> None:
        self._row = ""
        self._cut = 0
        self._redrawn = False
        self._returned = False
        r"""The last thing was a `\r`: the next text replaces the row, and `\n` ends it as it is."""
        self._below: dict[int, str] = {}
        self._style = ""

    def feed(self, text: str) -> list[str]:
        """The lines that this text finishes, without their newlines. A `Redrawn` among them was redrawn."""
        if self._redrawn or self._returned or self._style or "\r" in text or "\x1b" in text or "\x1b" in self._row:
            return self._feed_carefully(text)
        first, *rest = text.split("\n")
        if not rest:
            self._append(first)
            return []
        lines = [_clipped(self._row + first, self._cut), *rest[:-1]]
        if max(map(len, rest)) > LONGEST:
            lines[1:] = [_clipped(line) for line in lines[1:]]
        self._row, self._cut = "", 0
        self._append(rest[-1])
        return lines

    @property
    def open(self) -> str:
        """What stands in the open row now; empty when nothing visible does."""
        shown = "  ".join(part for part in (self._row, *self._below.values()) if part.strip())
        return self._styled(shown)[0] if shown else ""

    @property
    def redrawn(self) -> bool:
        """Whether the open row is one that is drawn over."""
        return self._redrawn

    def finish(self) -> list[str]:
        """End the open row: what is still visible, as lines."""
        below = [Redrawn(text) for text in self._below.values()]
        erased = not self._row.strip() and (self._redrawn or self._returned)
        lines = [self._commit()] if self._row and not erased else []
        self._row, self._redrawn, self._returned, self._below = "", False, False, {}
        return [*lines, *below]

    def _feed_carefully(self, text: str) -> list[str]:
        text = BELOW.sub(self._draw_below, text)
        lines = []
        *finished, row = text.split("\n")
        for piece in finished:
            self._draw(piece)
            lines.append(self._commit())
        self._draw(row)
        return lines

    def _draw_below(self, match: re.Match[str]) -> str:
        depth, text = len(match[1]), match[2]
        text = next((part for part in reversed(text.split("\r")) if part), "")
        if text.strip():
            self._below[depth] = text
        else:
            self._below.pop(depth, None)
        return ""

    def _draw(self, piece: str) -> None:
        first, *redraws = piece.split("\r")
        if first:
            if self._returned:
                self._restart(first)
            else:
                self._append(first)
        if redraws:
            state = next((part for part in reversed(redraws) if part), "")
            if state:
                self._restart(state)
            self._returned = not redraws[-1]

    def _restart(self, text: str) -> None:
        self._row, self._cut = "", 0
        self._redrawn, self._returned = True, False
        self._append(text)

    def _append(self, text: str) -> None:
        row = self._row + text
        if len(row) > LONGEST:
            self._cut += len(row) - LONGEST
            row = row[:LONGEST]
        self._row = row

    def _commit(self) -> str:
        line, self._style = self._styled(_clipped(self._row, self._cut))
        if self._redrawn:
            line = Redrawn(line)
        self._row, self._cut, self._redrawn, self._returned = "", 0, False, False
        if not line.strip():
            return line
        self._below.clear()
        return line

    def _styled(self, line: str) -> tuple[str, str]:
        """The line with the style it began in and all styles closed at its end, and the style that goes on."""
        style = self._style
        for code in SGR.finditer(line):
            style = "" if all(p in CLOSING for p in code[1].split(";")) else (style + code[0])[-200:]
        if self._style:
            line = self._style + line
        return (line + "\x1b[0m" if style else line), style


def _clipped(line: str, cut: int = 0) -> str:
    more = max(0, len(line) - LONGEST) + cut
    return f"{line[:LONGEST]}... {more:,} characters folded: %ddl log shows all" if more else line
