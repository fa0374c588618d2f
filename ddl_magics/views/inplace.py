r"""The last row of the output, which is redrawn in place with `\r`.

Notebooks and terminals alike know only `\r` here (a notebook's text output has no cursor that goes up), so all that is
unfinished shares one row. It is erased before lines are written, and drawn again below them. It goes to the stream that
was written last, because each change of stream starts a new block of output in a notebook.
"""

from __future__ import annotations

from ddl_magics.views.rows import SGR

BETWEEN = "  │  "


class InPlace:
    r"""The row as it stands on the screen.

    Parameters
    ----------
    width
        Columns of a terminal, whose `\r` goes back only to the start of the last wrapped row; None elsewhere.
    """

    def __init__(self, width: int | None = None) -> None:
        self._width = width
        self._text = ""
        self._name = ""
        """The stream it is drawn on."""
        self._last = ""
        """The stream that was written last."""

    def compose(self, lines: list[tuple[str, str]], parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """What to write so that `lines` are on the screen for good and `parts` in the row after them."""
        out: list[tuple[str, str]] = []
        if self._text and (lines or not parts):
            out.append((self._name, f"\r{' ' * len(self._text)}\r"))
            self._text = ""
        out += lines
        if lines:
            self._last = lines[-1][0]
        if parts:
            self._draw(parts, out)
        return _joined(out)

    def _draw(self, parts: list[tuple[str, str]], out: list[tuple[str, str]]) -> None:
        text = BETWEEN.join(text for _, text in parts)
        if self._width is not None and len(text) >= self._width:
            text = SGR.sub("", text)[: self._width - 1]
        if text == self._text:
            return
        if self._text:
            out.append((self._name, f"\r{text.ljust(len(self._text))}"))
        else:
            self._name = self._last or parts[0][0]
            out.append((self._name, text))
        self._text = text


def _joined(pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of the same stream as one."""
    out: list[tuple[str, list[str]]] = []
    for name, text in pieces:
        if out and out[-1][0] == name:
            out[-1][1].append(text)
        else:
            out.append((name, [text]))
    return [(name, "".join(texts)) for name, texts in out]
