"""The panel as one piece of HTML: text that can be selected and read aloud, bars and curves as inline SVG.

It stands alone: no script, no file, no font. Colours of text come from the page (Jupyter's variables where they exist).
The same text is shown live and kept in the saved notebook.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from ddl_magics.views import format as fmt
from ddl_magics.views import svg
from ddl_magics.views.content import panel_content
from ddl_magics.views.palette import BLUE, KINDS, STATES, WARNING

if TYPE_CHECKING:
    from ddl_magics.telemetry.series import Curve
    from ddl_magics.telemetry.snapshot import RunView
    from ddl_magics.views.content import Panel
    from ddl_magics.views.memory import MemoryPicture, MemoryRow
    from ddl_magics.views.standing import Where

# Notebooks give every svg, table and code of an output styles of their own (an svg loses its height): what matters is
# said again here, and sizes in the svg's own style.
STYLE = """
.ddl{font:13px/1.45 var(--jp-ui-font-family,system-ui,sans-serif);color:var(--jp-ui-font-color1,inherit);
max-width:960px;padding:4px 2px 8px;font-variant-numeric:tabular-nums}
.ddl *{box-sizing:border-box}
.ddl .row{display:flex;flex-wrap:wrap;align-items:baseline;gap:0 10px}
.ddl .end{margin-left:auto}
.ddl .big{font-size:16px;font-weight:600}
.ddl .dim{opacity:.72}
.ddl b{font-weight:600}
.ddl .track{height:6px;margin:4px 0;position:relative;border-radius:3px;overflow:hidden}
.ddl .track i{position:absolute;inset:0;display:block;background:currentColor;opacity:.12}
.ddl .track i+i{background:#0072B2;opacity:1;right:auto}
.ddl .cols{display:flex;flex-wrap:wrap;gap:6px 32px;margin-top:10px}
.ddl .cols>div{flex:1 1 460px;min-width:0}
.ddl .cols>div+div{flex:1 1 380px}
.ddl .bars{display:grid;grid-template-columns:max-content 1fr max-content max-content;gap:4px 8px;
align-items:center;margin:6px 0}
.ddl .bars>*{white-space:nowrap}
.ddl .bars svg,.ddl .spark svg{display:block;margin:0;max-width:none}
.ddl .num{text-align:right}
.ddl .key{display:flex;flex-wrap:wrap;gap:0 10px;font-size:11.5px}
.ddl .key i{display:inline-block;width:10px;height:10px;margin-right:4px}
.ddl .spark{display:flex;flex-wrap:wrap;gap:2px 18px;font-size:12px;margin-top:2px}
.ddl .spark span{display:inline-flex;gap:6px;align-items:center}
.ddl .where{display:grid;grid-template-columns:max-content max-content 1fr;gap:0 16px;margin-top:8px;padding-top:6px;
border-top:1px solid rgba(128,128,128,.3)}
.ddl .where i{display:inline-block;width:9px;height:9px;border-radius:5px;margin-right:8px}
.ddl .where span{overflow-wrap:anywhere}
.ddl .code{font-family:var(--jp-code-font-family,monospace);font-size:12px}
.ddl .warn{color:#D55E00;font-weight:600}
.ddl .held{margin-top:8px;padding:4px 0 4px 10px;border-left:3px solid #D55E00}
"""


def panel_html(view: RunView) -> str:
    """The panel of a run as it stands."""
    panel = panel_content(view)
    columns = [_memory(panel.memory)]
    if panel.loss is not None:
        columns.append(_loss(panel, panel.loss))
    parts = [
        f"<style>{STYLE}</style>",
        _header(panel),
        _held_up(panel),
        f'<div class="cols">{"".join(columns)}</div>',
        _where(panel),
        _notes(panel),
    ]
    return f'<div class="ddl" role="group" aria-label="Run {escape(panel.strategy)}">{"".join(parts)}</div>'


def _header(panel: Panel) -> str:
    status = f'<span class="end {"warn" if panel.failed else "dim"}">{escape(panel.status)}</span>'
    done = 0.0 if panel.done is None else panel.done
    position = f"<b>{escape(panel.position)}</b>" if panel.position else ""
    progress = " · ".join(part for part in (position, escape(panel.speed)) if part)
    return (
        f'<div class="row"><span class="big">{escape(panel.strategy)}</span>'
        f'<span class="dim">{escape(panel.about)}</span>{status}</div>'
        f'<div class="track" role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{100 * done:.0f}" '
        f'aria-label="steps done"><i></i><i style="width:{100 * done:.2f}%;background:{BLUE}"></i></div>'
        f"<div>{progress}</div>"
    )


def _held_up(panel: Panel) -> str:
    """Who waits for whom, above everything else; the last line says what to do."""
    if not panel.held_up:
        return ""
    lines = "".join(f"<div>{escape(text)}</div>" for text in panel.held_up)
    return f'<div class="held warn" style="color:{WARNING}" role="alert">{lines}</div>'


def _memory(memory: MemoryPicture) -> str:
    if not memory.rows:
        return f'<div><b>{escape(memory.heading)}</b><div class="dim">no record yet</div></div>'
    rows = "".join(_memory_row(row, memory) for row in memory.rows)
    key = "".join(f'<span><i style="background:{KINDS[k][0]}"></i>{KINDS[k][1]}</span>' for k in memory.kinds)
    note = f"; {escape(memory.note)}" if memory.note else ""
    return (
        f'<div><b>{escape(memory.heading)}</b><div class="bars">{rows}</div><div class="key">{key}</div>'
        f'<div class="dim">│ peak of the run{note}</div></div>'
    )


def _memory_row(row: MemoryRow, memory: MemoryPicture) -> str:
    kinds = ", ".join(f"{KINDS[k][1]} {fmt.size(row.kinds[k])}" for k in memory.kinds)
    label = f"{row.label}: {fmt.size(row.total)} in use, peak {fmt.size(row.peak)}; {kinds}"
    bar = svg.memory_bar(row.kinds, memory.scale, label, row.peak)
    return (
        f"<span>{escape(row.label)}</span><span>{bar}</span>"
        f'<b class="num">{memory.unit.digits(row.total)}</b>'
        f'<span class="dim num">peak {memory.unit.digits(row.peak)}</span>'
    )


def _loss(panel: Panel, loss: Curve) -> str:
    label = f"{loss.name}: {fmt.number(loss.first)} at first, {fmt.number(loss.last)} at step {loss.last_step}"
    more = f"<span>and {fmt.plural(panel.more_scalars, 'more metric')}</span>" if panel.more_scalars else ""
    small = "".join(_scalar(c) for c in panel.scalars)
    return (
        f'<div><div class="row"><b>{escape(loss.name.capitalize())}</b>'
        f'<span class="end dim">{escape(panel.loss_note)}</span>'
        f'<span class="{"big" if math.isfinite(loss.last) else "big warn"}">{fmt.number(loss.last)}</span></div>'
        f"{svg.curve(loss.points, label, panel.total_steps)}"
        f'<div class="spark">{small}{more}</div></div>'
    )


def _scalar(curve: Curve) -> str:
    value = fmt.number(curve.last)
    return (
        f'<span><span class="dim">{escape(curve.name)}</span>'
        f"{svg.spark(curve.points, f'{curve.name}: {value}')}<b>{value}</b></span>"
    )


def _where(panel: Panel) -> str:
    if not panel.where:
        return ""
    return f'<div class="where">{"".join(_where_row(row) for row in panel.where)}</div>'


def _where_row(row: Where) -> str:
    place, _, source = row.at.partition(": ")
    at = escape(place) + (f': <span class="code">{escape(source)}</span>' if source else "")
    colour = STATES.get(row.state, STATES["idle"])[0]
    return (
        f'<span><i style="background:{colour}"></i><b>{escape(row.who)}</b></span>'
        f'<span>{escape(row.doing)}</span><span class="dim">{at}</span>'
    )


def _notes(panel: Panel) -> str:
    warnings = "".join(f'<div class="warn" style="color:{WARNING}">{escape(text)}</div>' for text in panel.warnings)
    return warnings + "".join(f'<div class="dim">{escape(note)}</div>' for note in panel.notes)
