"""The life of a panel: it appears when a cell is worth one, is redrawn while it runs, and stays as a still picture.

Nothing runs by itself: whoever follows the cell calls `tick` as often as it likes and `freeze` at the end.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Protocol

from ddl_magics.views.holdups import sentence
from ddl_magics.views.panel_html import panel_html
from ddl_magics.views.screen import TerminalScreen
from ddl_magics.views.standing import ADVICE, situations
from ddl_magics.views.text import ansi, coloured, panel_lines, panel_text, status_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.telemetry.history import History
    from ddl_magics.telemetry.snapshot import RunView
    from ddl_magics.views.screen import Bundle, Screen

APPEARS = 2.0
"""Seconds after which a cell gets a panel even if it logs nothing."""
REDRAWN = 0.25
"""Seconds between two pictures at least."""
SHARE = 0.1
"""Of the notebook's time that drawing may take: with very many ranks it is redrawn less often."""


class Surface(Protocol):
    """One way to show a run that changes."""

    interval: float
    """Seconds between two drawings at least."""

    def draw(self, view: RunView) -> None:
        """Show the run as it is now."""

    def freeze(self, view: RunView) -> None:
        """Replace what was drawn by what stays."""


class Panel:
    """The panel of one cell.

    Parameters
    ----------
    history
        What the ranks send; somebody else fills it.
    screen
        Where the cell's output goes.
    clock
        Unix seconds, the clock of `history`.
    quiet
        Draw nothing; only say who waits for whom in vain.
    """

    def __init__(
        self, history: History, screen: Screen, clock: Callable[[], float] = time.time, *, quiet: bool = False
    ) -> None:
        self._history = history
        self._screen = screen
        self._clock = clock
        self._quiet = quiet
        self._surface: Surface | None = None
        self._next = 0.0

    @property
    def shown(self) -> bool:
        return self._surface is not None

    def tick(self) -> None:
        """Draw, if it is time to."""
        now = self._clock()
        if now < self._next or not self._worth_showing(now):
            return
        began = time.monotonic()
        if self._surface is None:
            self._surface = QuietSurface(self._screen) if self._quiet else surface_for(self._screen)
        self._surface.draw(self._history.view(now))
        cost = time.monotonic() - began
        self._next = now + max(self._surface.interval, cost / SHARE)

    def freeze(self) -> None:
        """Leave the still picture; nothing where the cell was too short for one."""
        now = self._clock()
        if self._surface is None:
            if self._quiet or not self._worth_showing(now):
                return
            self._surface = surface_for(self._screen)
        self._surface.freeze(self._history.view(now))

    def _worth_showing(self, now: float) -> bool:
        if self._history.has_metrics:
            return True
        return not self._history.finished and now - self._history.info.started >= APPEARS


def surface_for(screen: Screen) -> Surface:
    if screen.kind == "notebook":
        return NotebookSurface(screen)
    if screen.kind == "terminal" and isinstance(screen, TerminalScreen):
        return TerminalSurface(screen)
    return PlainSurface(screen)


def still_picture(view: RunView) -> Bundle:
    """What a saved notebook keeps."""
    return {"text/html": panel_html(view), "text/plain": panel_text(view)}


class NotebookSurface:
    """An HTML widget while the cell runs: one message a picture, whatever the number of ranks.

    At the end the output that holds the widget is replaced by the picture itself before the widget is closed, so that
    a saved notebook never holds a dead widget.
    """

    interval = REDRAWN

    def __init__(self, screen: Screen) -> None:
        from ipywidgets import HTML

        self._screen = screen
        self._id = uuid.uuid4().hex
        self._widget = HTML()
        self._shown = False

    def draw(self, view: RunView) -> None:
        html = panel_html(view)
        if html != self._widget.value:
            self._widget.value = html
        if not self._shown:
            bundle = {**self._widget._repr_mimebundle_(), "text/plain": panel_text(view)}
            self._screen.display(bundle, self._id)
            self._shown = True

    def freeze(self, view: RunView) -> None:
        self._screen.display(still_picture(view), self._id, update=self._shown)
        for part in (self._widget, self._widget.layout, self._widget.style):
            part.close()


class TerminalSurface:
    """A live region at the bottom of a terminal; the cell's text scrolls above it."""

    interval = REDRAWN

    def __init__(self, screen: TerminalScreen) -> None:
        self._screen = screen

    def draw(self, view: RunView) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        if self._screen.live is None:
            self._screen.live = Live(console=self._screen.console(), auto_refresh=False, transient=True)
            self._screen.live.start()
        live = self._screen.live
        picture = coloured(panel_lines(view, live.console.width))
        row = [Text.from_ansi(self._screen.row)] if self._screen.row else []
        live.update(Group(*row, picture), refresh=True)

    def freeze(self, view: RunView) -> None:
        live, self._screen.live = self._screen.live, None
        if live is not None:
            live.stop()
        row, self._screen.row = self._screen.row, ""
        self._screen.write("stdout", (f"{row}\n" if row else "") + ansi(panel_lines(view)) + "\n")


class QuietSurface:
    """No picture: a line when ranks wait in vain, once for each situation."""

    interval = 1.0

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._told: set[tuple[object, ...]] = set()

    def draw(self, view: RunView) -> None:
        for situation in situations(view):
            if situation.key not in self._told:
                self._told.add(situation.key)
                self._screen.write("stderr", f"{sentence(situation, len(view.ranks))}; {ADVICE}\n")

    def freeze(self, view: RunView) -> None:
        """Nothing stays but the lines."""


class PlainSurface(QuietSurface):
    """Also a line now and then where nothing can be redrawn, and the picture at the end."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        self._next = 0.0
        """Seconds of the run at which the next line is due."""

    def draw(self, view: RunView) -> None:
        elapsed = view.progress.elapsed
        if elapsed >= self._next:
            self._screen.write("stdout", status_line(view) + "\n")
            # Every 5 s in the first minute, then ever more seldom: a run of ten hours gets about a hundred lines.
            self._next = elapsed + max(5.0, elapsed / 12)
        super().draw(view)

    def freeze(self, view: RunView) -> None:
        self._screen.display(still_picture(view))
