"""The table of `%ddl check`: what each name is on which ranks, and whether they agree; as HTML and in characters."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from ddl_magics.views import table
from ddl_magics.views.status import TABLE_STYLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.views.screen import Screen
    from ddl_magics.views.text import Line

HEAD = ("name", "ranks", "what", "")


@dataclass(frozen=True)
class Row:
    """One name on some ranks."""

    name: str
    ranks: str
    what: str
    verdict: str
    ok: bool
    """Whether nothing here asks for attention."""


def show(rows: Sequence[Row], screen: Screen) -> None:
    """The table on a screen."""
    table.show(check_html(rows), check_lines(rows), screen)


def check_html(rows: Sequence[Row]) -> str:
    """One row for each group of ranks; a name stands once."""
    head = "".join(f'<th scope="col">{text}</th>' for text in HEAD)
    body = "".join(
        f"<tr><td><b>{escape(name)}</b></td><td>{escape(row.ranks)}</td><td>{escape(row.what)}</td>"
        f'<td{"" if row.ok else " class=warn"} style="white-space:normal">{escape(row.verdict)}</td></tr>'
        for name, row in _named(rows)
    )
    return (
        f'<style>{TABLE_STYLE}</style><div class="ddl-table"><table class="auto"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def check_lines(rows: Sequence[Row]) -> list[Line]:
    """The same in characters."""
    texts = [HEAD[:3], *((name, row.ranks, row.what) for name, row in _named(rows))]
    widths = [max(len(text[i]) for text in texts) for i in range(3)]
    lines: list[Line] = []
    for text, row in zip(texts, [None, *rows], strict=True):
        cells = [f"{cell:<{width}}  " for cell, width in zip(text, widths, strict=True)]
        styles = ["dim"] * 3 if row is None else ["bold", "", ""]
        verdict = [] if row is None else [(row.verdict, "" if row.ok else "warn")]
        lines.append([*zip(cells, styles, strict=True), *verdict])
    return lines


def _named(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Rows with the name where it is new."""
    before = ["", *(row.name for row in rows)]
    return [("" if row.name == name else row.name, row) for name, row in zip(before, rows, strict=False)]
