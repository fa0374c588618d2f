"""The runs of a session compared, as HTML, as plain text and for a terminal; and how tables get on a screen."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from ddl_magics.views import format as fmt
from ddl_magics.views import svg
from ddl_magics.views.palette import KINDS, STATES, WARNING
from ddl_magics.views.status import TABLE_STYLE, status_html, status_lines
from ddl_magics.views.text import ansi, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.telemetry.runs import RunRow
    from ddl_magics.views.screen import Bundle, Screen
    from ddl_magics.views.status import StatusRow
    from ddl_magics.views.text import Line

HEADS = {"parameters": "params", "gradients": "grads", "optimizer": "optim.", "other": "other", "reserved": "reserved"}
"""Kind of memory -> head of its column, where figures stand under it."""


def runs_bundle(rows: Sequence[RunRow]) -> Bundle:
    """The comparison as a picture: HTML and plain text."""
    return {"text/html": runs_html(rows), "text/plain": plain(runs_lines(rows))}


def show_runs(rows: Sequence[RunRow], screen: Screen) -> None:
    """The comparison on a screen."""
    show(runs_html(rows), runs_lines(rows), screen)


def show_status(rows: Sequence[StatusRow], screen: Screen) -> None:
    """Where every rank is, on a screen."""
    show(status_html(rows), status_lines(rows), screen)


def show(html: str, lines: Sequence[Line], screen: Screen) -> None:
    """HTML with plain text in a notebook, colours in a terminal."""
    if screen.kind == "terminal":
        screen.write("stdout", ansi(lines) + "\n")
    else:
        screen.display({"text/html": html, "text/plain": plain(lines)})


def runs_html(rows: Sequence[RunRow]) -> str:
    """One row a run, the memory of all on one scale."""
    if not rows:
        return f"<style>{TABLE_STYLE}</style><div class='ddl-table'>No run has ended yet.</div>"
    scale = max(row.peak_total for row in rows)
    unit = fmt.byte_unit(scale)
    kinds = _kinds(rows)
    names = _names(rows)
    first = names[0]
    metric = _metric(rows)
    head = [
        ("run", ""),
        (f"first {metric}", "num"),
        (f"last {metric}", "num"),
        (f"peak of a rank, {unit.name}", "wide"),
        ("", "num"),
        *((HEADS[kind], "num") for kind in kinds),
        (f"of {first}", "num"),
        (_speed_name(rows), "num"),
        ("s a step", "num"),
        ("speed-up", "num"),
        ("", ""),
    ]
    header = "".join(f'<th scope="col" class="{c}">{escape(text)}</th>' for text, c in head)
    body = "".join(_run_html(row, name, metric, scale, unit, kinds) for row, name in zip(rows, names, strict=True))
    key = "".join(f'<span><i style="background:{KINDS[k][0]}"></i>{KINDS[k][1]}</span>' for k in kinds)
    return (
        f'<style>{TABLE_STYLE}</style><div class="ddl-table"><b>Runs</b>'
        f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
        f'<div class="key">{key}</div></div>'
    )


def _run_html(row: RunRow, name: str, metric: str, scale: float, unit: fmt.Unit, kinds: Sequence[str]) -> str:
    parts = ", ".join(f"{KINDS[k][1]} {fmt.size(row.peak[k])}" for k in kinds)
    label = f"{name}: peak {fmt.size(row.peak_total)} on rank {row.peak_rank}; {parts}"
    picture = svg.memory_bar(row.peak, scale, label) if row.peak_total else ""
    peak = unit.digits(row.peak_total) if row.peak_total else fmt.NOTHING
    by_kind = "".join(f'<td class="num">{figure}</td>' for figure in _by_kind(row, unit, kinds))
    outcome = "" if row.outcome == "ok" else STATES.get(row.outcome, ("", row.outcome))[1]
    return (
        f'<tr><th scope="row">{escape(name)}</th>'
        f'<td class="num">{_first(row, metric)}</td><td class="num">{_last(row, metric)}</td>'
        f'<td class="wide">{picture}</td><td class="num"><b>{peak}</b></td>{by_kind}'
        f'<td class="num">{_ratio(row.memory_ratio)}</td><td class="num">{_speed(row)}</td>'
        f'<td class="num">{_seconds(row)}</td><td class="num">{_ratio(row.speedup)}</td>'
        f'<td class="warn" style="color:{WARNING}">{escape(outcome)}</td></tr>'
    )


def runs_lines(rows: Sequence[RunRow]) -> list[Line]:
    """The comparison in characters."""
    if not rows:
        return [[("No run has ended yet.", "dim")]]
    unit = fmt.byte_unit(max(row.peak_total for row in rows))
    kinds = _kinds(rows)
    names = _names(rows)
    metric = _metric(rows)
    heads = [HEADS[kind] for kind in kinds]
    values = [f"first {metric}", f"last {metric}"]
    ratios = [f"of {names[0]}", _speed_name(rows), "s a step", "speed-up"]
    table = [["run", *values, f"peak {unit.name}:", *heads, *ratios]]
    for row, name in zip(rows, names, strict=True):
        peak = unit.digits(row.peak_total) if row.peak_total else fmt.NOTHING
        memory = [peak, *_by_kind(row, unit, kinds), _ratio(row.memory_ratio)]
        table.append(
            [name, _first(row, metric), _last(row, metric), *memory, _speed(row), _seconds(row), _ratio(row.speedup)]
        )
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines: list[Line] = []
    for number, (name, *figures) in enumerate(table):
        line: Line = [(f"{name:<{widths[0]}}", "bold" if number else "dim")]
        aligned = (f"  {text:>{width}}" for text, width in zip(figures, widths[1:], strict=True))
        line.append(("".join(aligned), "" if number else "dim"))
        if number and (outcome := rows[number - 1].outcome) != "ok":
            line.append((f"  {STATES.get(outcome, ('', outcome))[1]}", "warn"))
        lines.append(line)
    return lines


def _metric(rows: Sequence[RunRow]) -> str:
    """The metric by which runs compare: the loss where one of them has it."""
    metrics = list(dict.fromkeys(row.metric for row in rows if row.metric))
    return "loss" if "loss" in metrics or not metrics else metrics[0]


def _first(row: RunRow, metric: str) -> str:
    return _value(row.first) if row.metric == metric else fmt.NOTHING


def _last(row: RunRow, metric: str) -> str:
    return _value(row.last) if row.metric == metric else fmt.NOTHING


def _by_kind(row: RunRow, unit: fmt.Unit, kinds: Sequence[str]) -> list[str]:
    """Figures of the kinds at the peak."""
    return [unit.digits(row.peak[kind]) if row.peak_total else fmt.NOTHING for kind in kinds]


def _names(rows: Sequence[RunRow]) -> list[str]:
    """The strategy, with the run's own name where strategies repeat."""
    strategies = [row.strategy for row in rows]
    return [
        row.strategy
        if strategies.count(row.strategy) == 1 or row.name == row.strategy
        else f"{row.strategy} {row.name}"
        for row in rows
    ]


def _kinds(rows: Sequence[RunRow]) -> list[str]:
    return [kind for kind in KINDS if kind != "reserved" or any(row.peak[kind] for row in rows)]


def _value(x: float) -> str:
    return fmt.number(x) if not math.isnan(x) else fmt.NOTHING


def _ratio(x: float | None) -> str:
    return f"{x:.2f}" if x is not None else fmt.NOTHING


def _speed_name(rows: Sequence[RunRow]) -> str:
    tokens = any(row.tokens_per_second is not None for row in rows)
    return "tokens/s" if tokens or all(row.samples_per_second is None for row in rows) else "samples/s"


def _speed(row: RunRow) -> str:
    speed = row.tokens_per_second if row.tokens_per_second is not None else row.samples_per_second
    return fmt.rate(speed) if speed is not None else fmt.NOTHING


def _seconds(row: RunRow) -> str:
    return fmt.three_digits(row.seconds_per_step) if row.seconds_per_step is not None else fmt.NOTHING
