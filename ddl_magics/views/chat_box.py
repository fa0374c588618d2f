"""A chat in a notebook: the transcript as ordinary output, and below it a field with buttons, as a widget.

Two outputs, because a widget's state is lost where a notebook is saved without it: the transcript stays, as HTML and
text. The field goes when the chat is closed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.views.screen import Screen
    from ddl_magics.views.transcript import Transcript

REDRAWN = 0.25
"""Seconds between two drawings of a transcript that grows."""
LETTERS_S = 0.25
"""Seconds in which letters arrive that were typed before Enter: the front end sends them when it has an answer to those
before."""


class ChatBox:
    """What the user sees and presses.

    Parameters
    ----------
    transcript
        What is drawn; somebody else fills it.
    screen
        Of the cell that opened the chat.
    send, stop, clear
        Called with the message, and when a button is pressed, on the kernel's main thread.
    """

    def __init__(
        self,
        transcript: Transcript,
        screen: Screen,
        *,
        send: Callable[[str], object],
        stop: Callable[[], object],
        clear: Callable[[], object],
    ) -> None:
        from ipywidgets import Button, HBox, Layout, Text

        self._transcript = transcript
        self._screen = screen
        self._id, self._controls_id = uuid.uuid4().hex, uuid.uuid4().hex
        self._drawn = 0.0
        self._send = send
        self.field = Text(placeholder="Say something", layout=Layout(width="36em"))
        self.field.on_msg(self._typed)
        self.buttons = {}
        for name, action in (("Send", self._take), ("Stop", stop), ("Clear", clear)):
            button = Button(description=name, layout=Layout(width="5em"))
            button.on_click(lambda _, action=action: action())
            self.buttons[name] = button
        self._controls = HBox([self.field, *self.buttons.values()])
        self.answering(False)

    def show(self) -> None:
        """Put it below the cell."""
        self._screen.display(self._transcript.bundle(), self._id)
        bundle = {**self._controls._repr_mimebundle_(), "text/plain": "(a field to type in, while the notebook runs)"}
        self._screen.display(bundle, self._controls_id)

    def draw(self, *, now: bool = True) -> None:
        """Show the transcript as it is; without `now` only if the last drawing is a moment ago."""
        if now or time.monotonic() - self._drawn >= REDRAWN:
            self._drawn = time.monotonic()
            self._screen.display(self._transcript.bundle(), self._id, update=True)

    def answering(self, busy: bool) -> None:
        """Let the user stop an answer, or send a message."""
        self.buttons["Send"].disabled = busy
        self.buttons["Stop"].disabled = not busy

    def close(self) -> None:
        """Take the field away; the transcript stays."""
        self.draw()
        self._screen.display({"text/plain": "", "text/html": ""}, self._controls_id, update=True)
        for part in (self.field, *self.buttons.values(), self._controls):
            for piece in (part, part.layout, getattr(part, "style", None)):
                if piece is not None:
                    piece.close()

    def _typed(self, widget: Any, content: dict[str, Any], buffers: Any) -> None:
        """Enter in the field arrives as a message of its own, which may overtake the last letters."""
        if content.get("event") != "submit":
            return
        try:
            asyncio.get_running_loop().call_later(LETTERS_S, self._take)
        except RuntimeError:  # no loop handles this message
            self._take()

    def _take(self) -> None:
        text = self.field.value.strip()
        if text and not self.buttons["Send"].disabled:
            self.field.value = ""
            self._send(text)
