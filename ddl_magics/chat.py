"""A chat with a model on the ranks, as the notebook sees it: messages go there as small cells, answers come in pieces.

`ddl.chat` in a cell opens it. The box below the cell sends each message in the background, so that its own Stop works;
`%ddl chat` does the same where there is no box. Limits: one chat at a time, and no other cell while it answers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from IPython.core.error import StdinNotImplementedError

from ddl_magics.errors import DDLError, UsageError
from ddl_magics.parsing import CellOptions
from ddl_magics.strategies import spec as specs
from ddl_magics.views.chat_box import ChatBox
from ddl_magics.views.transcript import Line, Transcript

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.cells import Cells
    from ddl_magics.views.screen import Bundle, Kind, Screen

PLACE = re.compile(r" in line \d+ of the cell")
"""Where the ranks failed: the cell is ours."""


class Chat:
    """One chat.

    Parameters
    ----------
    opened
        What rank 0 told of it: `chat`, its key on the ranks, `model` and `strategy`.
    number
        Of this chat among those of the session, from 1.
    cells
        Of the cluster that it is on.
    cell
        Number of the cell that opened it.
    screen
        Of that cell.
    """

    def __init__(self, opened: dict[str, Any], number: int, cells: Cells, cell: int, screen: Screen) -> None:
        self._key: str = opened["chat"]
        self.number = number
        self._strategy = specs.parse(opened["strategy"])
        self._cells = cells
        self._cell = cell
        self._screen = screen
        self.transcript = Transcript(f"chat {self.number} with {opened['model']} under {opened['strategy']}")
        self._answer: Line | None = None
        self._presses = 0
        self._echo: Callable[[str], object] | None = None
        self.box: ChatBox | None = None

    def open(self) -> None:
        """Show the box; where there can be none, a line that says how to go on."""
        if self._screen.kind != "notebook":
            self._screen.write("stdout", f"{self.transcript.title}: %ddl chat talks to it\n")
            return
        self.box = ChatBox(self.transcript, self._screen, send=self.send, stop=self.stop, clear=self.clear)
        self.box.show()

    # From the box.

    def send(self, text: str) -> None:
        """Answer a message in the background; whatever goes wrong becomes a line of the transcript."""
        try:
            self._cells.check_ready()
        except DDLError as error:
            self._tell("error", str(error))
            return
        self._begin(text)
        self._cells.in_background(self._answer_quietly, self._screen)

    def stop(self) -> None:
        """End the answer with its next token; a second time, as Stop ends any cell."""
        self._presses += 1
        running = self._cells.running
        if self._presses == 1:
            self._cells.cluster.client.ask("hush", [0])
        elif running is not None:
            running.presses += 1

    def clear(self) -> None:
        """Forget what was said, here and on the ranks."""
        try:
            self._cells.check_ready()
            self._run(None, _Aside(self._tell))
        except (DDLError, KeyboardInterrupt) as error:
            self._tell("error", str(error))
            return
        self.transcript.clear()
        self._draw()

    def close(self) -> None:
        """Take the box away; what was said stays."""
        box, self.box = self.box, None
        if box is not None:
            box.close()

    # From `%ddl chat`.

    def ask(self, text: str, screen: Screen) -> None:
        """Answer a message now, on `screen`; raises what a cell raises."""
        self._cells.check_ready()
        self._begin(text)
        self._echo = lambda piece: screen.write("stdout", piece)
        try:
            self._run(text, screen)
        finally:
            self._echo = None
            self._end()

    def converse(self, screen: Screen) -> None:
        """Ask for messages until an empty one. Raises UsageError where the front end cannot ask."""
        while True:
            try:
                text = input("you> ").strip()
            except EOFError:
                return
            except StdinNotImplementedError:
                raise UsageError("this front end cannot ask for input", 'Write %ddl chat "your message".') from None
            if not text:
                return
            self.ask(text, screen)

    # One answer.

    def _begin(self, text: str) -> None:
        self._presses = 0
        self.transcript.add("you", text)
        self._answer = self.transcript.add("model", "")
        if self.box is not None:
            self.box.answering(True)
        self._draw()

    def _answer_quietly(self) -> None:
        failure = ""
        try:
            self._run(self.transcript.lines[-2].text, _Aside(self._tell))
        except KeyboardInterrupt:
            failure = "stopped; the model does not know of this answer"
        except DDLError as error:
            failure = PLACE.sub("", str(error))
        finally:
            self._end()
            self._tell("error", failure)

    def _run(self, text: str | None, screen: Screen) -> None:
        """Run a cell on the ranks that answers, under the strategy of the model; None lets it forget."""
        options = CellOptions(strategies=(self._strategy,), name=f"chat {self.number}", panel=False, output="rank0")
        code = f"ddl.reply({text!r}, chat={self._key!r})"
        requests = self._cells.requests(code, options, self._strategy, self._cell)
        self._cells.run(requests, options, "", screen, self._hear)

    def _end(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.text = answer.text.rstrip("\n")
            if not answer.text:
                self.transcript.lines.remove(answer)
        if self.box is not None:
            self.box.answering(False)
        self._draw()

    def _hear(self, content: dict[str, Any]) -> None:
        """What rank 0 tells: a piece of the answer, or how it went."""
        if self._answer is None or content["chat"] != self._key:
            return
        if "text" in content:
            self._answer.text += content["text"]
            if self._echo is not None:
                self._echo(content["text"])
        elif "figures" in content:
            self._answer.below = content["figures"]
        self._draw(now=False)

    def _tell(self, who: Literal["note", "error"], text: str) -> None:
        for line in text.splitlines():
            if line.strip():
                self.transcript.add(who, line)
        self._draw()

    def _draw(self, *, now: bool = True) -> None:
        if self.box is not None:
            self.box.draw(now=now)


class _Aside:
    """A screen whose text becomes notes in the transcript: what ranks print while they answer."""

    kind: Kind = "headless"

    def __init__(self, tell: Callable[[Literal["note", "error"], str], object]) -> None:
        self._tell = tell

    def display(self, data: Bundle, display_id: str | None = None, *, update: bool = False) -> None:
        """Pictures have no place in a chat."""

    def write(self, name: str, text: str) -> None:
        self._tell("note", text)
