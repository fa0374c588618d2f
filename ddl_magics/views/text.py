"""The panel in characters: plain text for a saved notebook and logs, with colours for a terminal.

A picture is a list of lines, a line a list of pieces (text, style). Styles are `bold`, `dim`, `warn`, a kind of memory
or a state of `palette`; plain text leaves them out, and letters instead of colours tell the kinds apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddl_magics.views import format as fmt
from ddl_magics.views.content import panel_content
from ddl_magics.views.palette import KINDS, STATES, WARNING
from ddl_magics.views.svg import thinned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.text import Text

    from ddl_magics.telemetry.series import CurvePoint
    from ddl_magics.telemetry.snapshot import RunView
    from ddl_magics.views.content import Panel
    from ddl_magics.views.memory import MemoryPicture

Piece = tuple[str, str]
Line = list[Piece]

WIDTH = 100
BAR = 40
SPARK = "▁▂▃▄▅▆▇█"


def panel_text(view: RunView, width: int = WIDTH) -> str:
    """The panel as plain text."""
    return plain(panel_lines(view, width))


def panel_lines(view: RunView, width: int = WIDTH) -> list[Line]:
    """The panel, line by line, in at most `width` columns where words allow."""
    panel = panel_content(view)
    held: list[Line] = [[(text, "warn")] for text in panel.held_up]
    lines = [*_header(panel, width), *([[], *held] if held else []), [], *_memory(panel.memory)]
    if panel.loss is not None:
        lines += [[], *_metrics(panel)]
    if panel.where:
        lines.append([])
        who, doing = (max(len(getattr(row, field)) for row in panel.where) for field in ("who", "doing"))
        for row in panel.where:
            lines.append(
                [("● ", row.state), (f"{row.who:<{who}}  ", "bold"), (f"{row.doing:<{doing}}  ", ""), (row.at, "dim")]
            )
    lines += [[(text, "warn")] for text in panel.warnings]
    lines += [[(note, "dim")] for note in panel.notes]
    return lines


def status_line(view: RunView) -> str:
    """The whole run in one line, for output that nobody can redraw."""
    panel = panel_content(view)
    loss = f"{panel.loss.name} {fmt.number(panel.loss.last)}" if panel.loss else ""
    top = max((row.total for row in panel.memory.rows), default=0)
    memory = f"{fmt.size(top)} a rank at most" if top else ""
    parts = [panel.strategy, panel.position, loss, panel.speed, memory, panel.status, *panel.warnings]
    return " · ".join(part for part in parts if part)


def plain(lines: Sequence[Line]) -> str:
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def coloured(lines: Sequence[Line]) -> Text:
    """The same for rich: bars are blocks of colour, and letters stay where there is no colour."""
    from rich.text import Text

    colours = {kind: colour for kind, (colour, _, _) in KINDS.items()}
    styles = {
        "bold": "bold",
        "dim": "dim",
        "warn": f"bold {WARNING}",
        **{kind: f"{colour} on {colour}" for kind, colour in colours.items()},
        **{state: colour for state, (colour, _) in STATES.items()},
    }
    text = Text()
    for number, line in enumerate(lines):
        if number:
            text.append("\n")
        for piece, style in line:
            text.append(piece, style=styles.get(style, ""))
    return text


def ansi(lines: Sequence[Line]) -> str:
    """The same as text with ANSI colours."""
    import io

    from rich.console import Console

    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="truecolor", width=10_000).print(coloured(lines), end="")
    return out.getvalue()


def bar(kinds: Mapping[str, float], scale: float, peak: float = 0, width: int = BAR) -> Line:
    """A stacked bar of `width` characters on a track of dots, with a `|` at the peak.

    Each boundary is rounded on its own, so that rounding does not add up.
    """
    cells: list[Piece] = []
    sum_ = 0.0
    for kind, (_, _, letter) in KINDS.items():
        sum_ += max(0.0, kinds.get(kind, 0))
        end = min(width, round(width * sum_ / scale)) if scale > 0 else 0
        cells += [(letter, kind)] * (end - len(cells))
    cells += [("·", "dim")] * (width - len(cells))
    if peak > 0 and scale > 0:
        cells[min(width - 1, round(width * peak / scale))] = ("|", "bold")
    return _runs(cells)


def sparkline(points: Sequence[CurvePoint], width: int = 40) -> str:
    """The mean as blocks of eight heights, `×` where no value was finite."""
    thin = thinned(points, width)
    finite = [p.mean for p in thin if math.isfinite(p.mean)]
    if not finite:
        return "×" * len(thin)
    low, room = min(finite), max(finite) - min(finite)
    heights = (round(7 * (p.mean - low) / room) if room and math.isfinite(p.mean) else 3 for p in thin)
    return "".join(SPARK[h] if math.isfinite(p.mean) else "×" for p, h in zip(thin, heights, strict=True))


def legend(kinds: Sequence[str]) -> Line:
    line: Line = []
    for kind in kinds:
        _, name, letter = KINDS[kind]
        line += [(letter, kind), (f" {name}  ", "")]
    return line


def _header(panel: Panel, width: int) -> list[Line]:
    lines: list[Line] = [
        [(panel.strategy, "bold"), (f"  {panel.about}", "dim"), (f"  {panel.status}", "warn" if panel.failed else "")]
    ]
    if panel.done is not None:
        room = min(width, WIDTH)
        full = round(panel.done * room)
        lines.append([("━" * full, "running"), ("╌" * (room - full), "dim")])
    between = " · " if panel.position and panel.speed else ""
    progress: Line = [(panel.position, "bold"), (between + panel.speed, "")]
    return [*lines, progress] if panel.position or panel.speed else lines


def _memory(memory: MemoryPicture) -> list[Line]:
    if not memory.rows:
        return [[(memory.heading, "bold")], [("no record yet", "dim")]]
    lines: list[Line] = [[(memory.heading, "bold")]]
    label = max(len(row.label) for row in memory.rows)
    for row in memory.rows:
        total, peak = memory.unit.digits(row.total), memory.unit.digits(row.peak)
        figures: Line = [(f"  {total:>5}", "bold"), (f"  peak {peak:>5}", "dim")]
        lines.append([(f"{row.label:<{label}}  ", ""), *bar(row.kinds, memory.scale, row.peak), *figures])
    lines.append([(" " * (label + 2), ""), *legend(memory.kinds), ("| peak", "dim")])
    if memory.note:
        lines.append([(" " * (label + 2) + memory.note, "dim")])
    return lines


def _metrics(panel: Panel) -> list[Line]:
    loss = panel.loss
    assert loss is not None
    lines: list[Line] = [
        [
            (f"{loss.name} {fmt.number(loss.last)}", "bold"),
            (f"  at step {loss.last_step:,}, {panel.loss_note}  ", "dim"),
            (f"{fmt.number(loss.first)} ", ""),
            (sparkline(loss.points), "running"),
        ]
    ]
    if panel.scalars:
        scalars = " · ".join(f"{c.name} {fmt.number(c.last)}" for c in panel.scalars)
        more = f" · and {panel.more_scalars} more" if panel.more_scalars else ""
        lines.append([(scalars + more, "dim")])
    return lines


def _runs(cells: list[Piece]) -> Line:
    """Neighbours of one style as one piece."""
    line: Line = []
    for text, style in cells:
        if line and line[-1][1] == style:
            line[-1] = (line[-1][0] + text, style)
        else:
            line.append((text, style))
    return line
