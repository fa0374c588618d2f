"""Where every rank is (`%ddl status`), as HTML and in characters."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Self

from ddl_magics.views import format as fmt
from ddl_magics.views.holdups import called
from ddl_magics.views.palette import STATES
from ddl_magics.views.standing import cut
from ddl_magics.waits import waiting_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddl_magics.views.text import Line

HEAD = ("rank", "host", "pid", "device", "memory", "state", "cell line")
RIGHT = (0, 2, 4)
"""Columns of figures."""
STATE_COLUMN = 5
LINE_COLUMN = 6

TABLE_STYLE = """
.ddl-table{font:13px/1.45 var(--jp-ui-font-family,system-ui,sans-serif);color:var(--jp-ui-font-color1,inherit);
max-width:960px;padding:4px 2px 8px;font-variant-numeric:tabular-nums}
.ddl-table table{border-collapse:collapse;border:0;width:100%;margin:4px 0;font-size:13px;
color:inherit;table-layout:auto}
.ddl-table tr,.ddl-table tbody tr,.ddl-table thead{background:none!important;border:0}
.ddl-table th,.ddl-table td{padding:3px 10px 3px 0!important;text-align:left!important;white-space:nowrap;
vertical-align:middle!important;border:0;color:inherit;max-width:none}
.ddl-table thead th{font-weight:400;opacity:.72;font-size:12px;border-bottom:1px solid rgba(128,128,128,.4)!important}
.ddl-table .num{text-align:right!important}
.ddl-table .wide{width:45%}
.ddl-table td.code{font-family:var(--jp-code-font-family,monospace);font-size:12px;white-space:normal;
overflow-wrap:anywhere}
.ddl-table svg{display:block;margin:0;max-width:none}
.ddl-table .key{font-size:12px}
.ddl-table table.auto{width:auto}
.ddl-table .key i,.ddl-table td i{display:inline-block;width:10px;height:10px;margin-right:5px}
.ddl-table .key span{margin-right:12px}
.ddl-table .warn{color:#D55E00;font-weight:600}
"""


@dataclass(frozen=True)
class StatusRow:
    """One rank."""

    rank: int
    host: str
    pid: int
    device: str
    memory: int
    """Bytes in use, on a CPU the whole process; 0 where that is not known."""
    capacity: int
    state: str
    """A `State`, or words such as `no answer`."""
    seconds: float | None
    """How long it has been in that state."""
    line: int | None
    source: str
    collective: str = ""
    """In which it waits."""

    @classmethod
    def of(cls, fact: Mapping[str, Any], state: Mapping[str, Any]) -> Self:
        """From what the rank was at the start (rank, host, pid, device) and what it answers now."""
        memory = state.get("memory", {})
        waiting = waiting_of(state)
        return cls(
            rank=fact["rank"],
            host=fact["host"],
            pid=fact["pid"],
            device=fact["device"],
            memory=memory.get("resident") or memory.get("total", 0),
            capacity=memory.get("capacity", 0),
            state=state["state"],
            seconds=state.get("seconds"),
            line=state.get("line"),
            source=state.get("source") or "",
            collective=called(waiting) if waiting else "",
        )

    def texts(self) -> list[str]:
        """One text a column of HEAD."""
        memory = fmt.NOTHING
        if self.memory:
            memory = fmt.size(self.memory) + (f" of {fmt.size(self.capacity)}" if self.capacity else "")
        state = f"{self.state} in {self.collective}" if self.collective else self.state
        seconds = f" {fmt.waited(self.seconds)}" if self.seconds is not None and self.seconds >= 1 else ""
        line = ""
        if self.line is not None and self.state != "idle":
            line = f"{self.line}: {cut(self.source)}" if self.source.strip() else str(self.line)
        return [str(self.rank), self.host, str(self.pid), self.device, memory, state + seconds, line]


def status_html(rows: Sequence[StatusRow]) -> str:
    """A table, one row a rank."""
    head = "".join(f'<th scope="col" class="{_style(i)}">{text}</th>' for i, text in enumerate(HEAD))
    body = "".join(_row_html(row) for row in rows)
    return (
        f'<style>{TABLE_STYLE}</style><div class="ddl-table"><table class="auto"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def status_lines(rows: Sequence[StatusRow]) -> list[Line]:
    """The same table in characters."""
    table = [list(HEAD), *(row.texts() for row in rows)]
    widths = [max(len(texts[i]) for texts in table) for i in range(len(HEAD))]
    lines: list[Line] = []
    for number, texts in enumerate(table):
        line: Line = []
        for i, (text, width) in enumerate(zip(texts, widths, strict=True)):
            style = "dim" if number == 0 else rows[number - 1].state if i == STATE_COLUMN else ""
            line.append(((f"{text:>{width}}" if i in RIGHT else f"{text:<{width}}") + "  ", style))
        lines.append(line)
    return lines


def _row_html(row: StatusRow) -> str:
    colour = STATES.get(row.state, STATES["dead"])[0]
    cells = []
    for i, text in enumerate(row.texts()):
        dot = f'<i style="background:{colour};border-radius:5px"></i>' if i == STATE_COLUMN else ""
        cells.append(f'<td class="{_style(i)}">{dot}{escape(text)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _style(column: int) -> str:
    return "num" if column in RIGHT else "code" if column == LINE_COLUMN else ""
