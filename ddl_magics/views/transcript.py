"""A chat as a picture: who said what, in HTML and in plain text. What a saved notebook keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Literal

from ddl_magics.views.palette import BLUE, WARNING

if TYPE_CHECKING:
    from ddl_magics.views.screen import Bundle

Who = Literal["you", "model", "note", "error"]

BUBBLE = (
    "max-width:44em;margin:4px 0;padding:6px 10px;border-radius:6px;white-space:pre-wrap;line-height:1.4;"
    "border-left:3px solid {colour};background:rgba(127,127,127,.08)"
)
SMALL = "margin:2px 0 2px 12px;font-size:85%;color:{colour}"
COLOURS = {"you": "#999999", "model": BLUE}


@dataclass
class Line:
    """One thing that was said, or told of the chat."""

    who: Who
    text: str
    below: str = ""
    """Figures of an answer."""


@dataclass
class Transcript:
    """A chat so far."""

    title: str
    lines: list[Line] = field(default_factory=list)

    def add(self, who: Who, text: str) -> Line:
        """Put a line below the others."""
        self.lines.append(Line(who, text))
        return self.lines[-1]

    def clear(self) -> None:
        """Forget everything."""
        self.lines.clear()

    def bundle(self) -> Bundle:
        """Both formats."""
        return {"text/html": self.html(), "text/plain": self.plain()}

    def html(self) -> str:
        """One self-contained block; colours are readable on light and on dark pages."""
        inner = "".join(_html(line) for line in self.lines)
        title = f'<div style="{SMALL.format(colour="#888888")}">{escape(self.title)}</div>'
        return f'<div class="ddl-chat">{title}{inner}</div>'

    def plain(self) -> str:
        """As one would read it in a terminal."""
        shown = [self.title]
        for line in self.lines:
            mark = f"{line.who}> " if line.who in COLOURS else ""
            shown.append(f"{mark}{line.text}" + (f"  ({line.below})" if line.below else ""))
        return "\n".join(shown)


def _html(line: Line) -> str:
    if line.who not in COLOURS:
        colour = WARNING if line.who == "error" else "#888888"
        return f'<div style="{SMALL.format(colour=colour)}">{escape(line.text)}</div>'
    below = f'<div style="{SMALL.format(colour="#888888")}">{escape(line.below)}</div>' if line.below else ""
    return f'<div style="{BUBBLE.format(colour=COLOURS[line.who])}">{escape(line.text)}</div>{below}'
