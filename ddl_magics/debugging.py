"""The conversation with ranks that have stopped at a `breakpoint()` of a cell in flight.

In the foreground the prompt opens by itself; of a cell in the background `%ddl debug` opens it. Nothing waits for a
user who is not there: where the front end cannot ask, one line says so and the ranks go on.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import DebugError
from ddl_magics.prompt import HELP, Prompt, cannot_ask, labelled
from ddl_magics.views.outputs import place_in_words, waits_in_words
from ddl_magics.views.ranges import in_words
from ddl_magics.views.screen import TerminalScreen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddl_magics.postmortem import Chosen
    from ddl_magics.running import RunningCell
    from ddl_magics.views.screen import Screen

SETTLE_S = 0.3
"""Seconds without news after which stops and output of the ranks are taken for complete, and the prompt comes."""
LONG_S = 1.5
"""Seconds after which it comes also while other ranks print on."""
STEP_S = 1.0
"""Seconds that a step may take before other stopped ranks can be asked: it may wait for one of them."""
COMMAND_S = 120.0
"""Seconds that a command has before it is interrupted."""
LOOK_S = 0.5
"""Seconds that the other ranks have to say where they are."""

ALL_GO_ON = {"c", "cont", "continue"}
STEPS = {"n", "next", "s", "step", "r", "return", "unt", "until"}


class Stops:
    """Looks after the stopped ranks of one cell; `look` is called all the time while the cell is followed."""

    def __init__(self, running: RunningCell) -> None:
        self._running = running
        self._conversation = Conversation(running, running.screen, running.pump)
        self._told: set[int] = set()
        self._stopped_at: float | None = None

    def look(self) -> None:
        """Attend to ranks that have stopped. Raises KeyboardInterrupt when the user quits the cell."""
        running = self._running
        self._stop_the_clock()
        if not running.stopped:
            self._told.clear()
        elif running.screen.kind == "headless":
            self._pass_over(cannot_ask())
        elif threading.current_thread() is threading.main_thread():
            try:
                self._conversation.hold()
            except DebugError as error:
                self._pass_over(error)
        elif not self._told:
            self._told |= set(running.stopped)
            running.say(f"{stops_in_words(running)}; %ddl debug opens a prompt there")

    def _stop_the_clock(self) -> None:
        """What a rank stands at a breakpoint does not count against the cell's time limit."""
        now = time.monotonic()
        if self._stopped_at is not None:
            self._running.started += now - self._stopped_at
        self._stopped_at = now if self._running.stopped else None

    def _pass_over(self, error: DebugError) -> None:
        running = self._running
        running.say(f"{stops_in_words(running)} and goes on: {error.message}")
        ask(running, list(running.stopped), "continue", ignore=True)


class Conversation:
    """Asks the user while ranks are stopped.

    Parameters
    ----------
    running
        The cell.
    screen
        Where the conversation is shown.
    pump
        Waits a moment for news of the ranks, and takes it.
    chosen
        The ranks to ask first; none: the first that stopped, of several at once the lowest.
    """

    def __init__(self, running: RunningCell, screen: Screen, pump: Callable[[], None], chosen: Chosen = None) -> None:
        self._running = running
        self._screen = screen
        self._pump = pump
        self._wanted = chosen
        self._prompt = Prompt(())
        self._shown: dict[int, dict[str, Any]] = {}
        """The last stop of each rank that was told."""
        self.left = False
        """The user let the cell go on, and did not ask for a step."""

    def hold(self) -> None:
        """Ask until no rank is stopped. Raises KeyboardInterrupt to end the cell, DebugError where nobody can be asked.

        Raises
        ------
        KeyboardInterrupt
            The user quits or presses Stop: the cell is to be ended on every rank.
        DebugError
            The front end cannot ask.
        """
        panel = self._running.panel
        if isinstance(self._screen, TerminalScreen):
            self._running.panel = None
            self._screen.put_live_aside()
        try:
            while self._settle():
                self._choose()
                self._tell()
                line = self._prompt.ask()
                if line is None:
                    raise KeyboardInterrupt
                self._do(line)
        finally:
            self._running.panel = panel

    def _settle(self) -> bool:
        """Wait until nothing new comes; whether ranks are stopped."""
        if self._shown and self._shown == self._running.stopped and not self._new_stops():  # the line only looked
            self._pump()
            return True
        before, since = None, time.monotonic()
        deadline = since + LONG_S
        while time.monotonic() < min(since + SETTLE_S, deadline):
            self._pump()
            now = (dict(self._running.stopped), self._running.news)
            if now != before:
                before, since = now, time.monotonic()
        return bool(self._running.stopped)

    def _choose(self) -> None:
        """Stay with the ranks that were asked last, as far as they are stopped."""
        ready = list(self._running.stopped)
        if self._wanted is not None:
            wanted = ready if self._wanted == "all" else [rank for rank in self._wanted if rank in ready]
            self._prompt.chosen, self._wanted = tuple(sorted(wanted)), None
        staying = [rank for rank in self._prompt.chosen if rank in ready]
        self._prompt.chosen = tuple(staying or [min(ready)])

    def _tell(self) -> None:
        """Say who has stopped where since the last time, and who waits."""
        stopped = self._running.stopped
        new = self._new_stops()
        if set(stopped) != set(self._shown):
            self._screen.write("stderr", f"{stops_in_words(self._running)}{self._others_in_words()}\n")
        self._shown = dict(stopped)
        if new:
            self._write(labelled({rank: stop["text"] for rank, stop in new.items()}))

    def _new_stops(self) -> dict[int, dict[str, Any]]:
        return {rank: stop for rank, stop in self._running.stopped.items() if self._shown.get(rank) is not stop}

    def _others_in_words(self) -> str:
        running = self._running
        states = {rank: state for rank, state in running.where(LOOK_S).items() if rank not in running.stopped}
        waiting = {
            r: place_in_words(s["waiting"]["name"], s["line"], s["of"]) for r, s in states.items() if s.get("waiting")
        }
        at_work = {r: s["line"] for r, s in states.items() if r not in waiting}
        said = [f"waiting: {waits_in_words(waiting)}"] if waiting else []
        said += [f"running: {by_line(at_work)}"] if at_work else []
        return "".join(f"; {part}" for part in said)

    def _do(self, line: str) -> None:
        stopped = list(self._running.stopped)
        wrong = self._prompt.choose(line, stopped)
        if wrong is not None:
            self._write(wrong or labelled(self._answers("here")))
            return
        word = line.partition(" ")[0]
        self.left = word in ALL_GO_ON
        if self.left:
            self._prompt.chosen = tuple(sorted(stopped))
            self._shown = {}
        self._write(labelled(self._answers(line)))
        if word in STEPS and len(self._prompt.chosen) < len(stopped):
            await_steps(self._running, self._prompt.chosen, self._pump)
        if line in {"help", "h", "?"}:
            self._write(HELP)

    def _answers(self, line: str) -> dict[int, str]:
        return ask(self._running, self._prompt.chosen, line, self._pump)

    def _write(self, text: str) -> None:
        self._screen.write("stdout", text)


def ask(
    running: RunningCell, ranks: Sequence[int], line: str, pump: Callable[[], None] | None = None, *,
    ignore: bool = False,
) -> dict[int, str]:  # fmt: skip
    """Execute a line on stopped ranks; their answers, without ranks that have died or are not stopped any more.

    Ctrl-C, or `COMMAND_S`, interrupts the line; pressed again it raises KeyboardInterrupt.
    """
    running.commands += 1
    number = running.commands
    replies = running.cluster.client.ask("debug", list(ranks), number=number, line=line, ignore=ignore)
    deadline, interrupted = time.monotonic() + COMMAND_S, False

    def late() -> list[int]:
        refused = {
            rank for rank, reply in replies.items() if reply.done() and not reply.result()["content"].get("result")
        }
        return [rank for rank in ranks if rank not in refused and rank not in running.idle
                and running.answers.get(rank, {}).get("number") != number]  # fmt: skip

    while late():
        try:
            (pump or running.pump)()
            if time.monotonic() < deadline:
                continue
        except KeyboardInterrupt:
            if interrupted:
                raise
        if interrupted:
            raise KeyboardInterrupt
        running.cluster.client.ask("interrupt", late())
        interrupted, deadline = True, time.monotonic() + COMMAND_S
    answers = {rank: running.answers.get(rank, {}) for rank in ranks}
    return {rank: answer["text"] for rank, answer in answers.items() if answer.get("number") == number}


def await_steps(running: RunningCell, ranks: Sequence[int], pump: Callable[[], None]) -> None:
    """Wait for ranks that take a step, for a moment only: it may wait for other ranks, which are stopped."""
    deadline = time.monotonic() + STEP_S
    while set(ranks) - set(running.stopped) - running.idle and time.monotonic() < deadline:
        pump()


def converse_beside(running: RunningCell, wanted: Chosen, screen: Screen) -> None:
    """Open the prompt on stopped ranks of a cell that another thread follows; `quit` and Stop end that cell."""
    conversation = Conversation(running, screen, _wait_beside, wanted)
    try:
        while not conversation.left and not running.done:
            conversation.hold()
            _wait_beside()  # a step of all ranks may be under way
    except KeyboardInterrupt:
        running.presses += 1


def command_beside(running: RunningCell, wanted: Chosen, commands: Sequence[str], screen: Screen) -> None:
    """Execute commands on stopped ranks of a cell that another thread follows, without a prompt."""
    stopped = list(running.stopped)
    chosen = stopped[:1] if wanted is None else stopped if wanted == "all" else list(wanted)
    absent = set(chosen) - set(stopped)
    if absent:
        raise DebugError(f"{in_words(absent)} did not stop at a breakpoint, {in_words(stopped)} did")
    for line in commands:
        ranks = list(running.stopped) if line in ALL_GO_ON else chosen
        screen.write("stdout", labelled(ask(running, ranks, line, _wait_beside)))
        if line.partition(" ")[0] in STEPS:
            await_steps(running, chosen, _wait_beside)
            at = {rank: stop["text"] for rank, stop in running.stopped.items() if rank in chosen}
            screen.write("stdout", labelled(at))


def _wait_beside() -> None:
    """Another thread takes the news."""
    time.sleep(0.05)


def stops_in_words(running: RunningCell) -> str:
    """`rank 1 stopped in line 4, ranks 2-3 in line 7 of In[2]`."""
    own = f"In[{running.request.cell}]"
    places: dict[str, list[int]] = {}
    for rank, stop in running.stopped.items():
        place = f"line {stop['line']}" + ("" if stop["file"] == own else f" of {stop['file']}")
        places.setdefault(place, []).append(rank)
    return ", ".join(
        f"{in_words(ranks)}{' stopped' if first else ''} in {place}"
        for first, (place, ranks) in zip([True] + [False] * len(places), places.items(), strict=False)
    )


def by_line(lines: dict[int, int | None]) -> str:
    """`ranks 0,2 in line 5; rank 3 in no line of the cell`."""
    ranks_at: dict[int | None, list[int]] = {}
    for rank, line in sorted(lines.items()):
        ranks_at.setdefault(line, []).append(rank)
    return "; ".join(
        f"{in_words(ranks)} in {f'line {line}' if line else 'no line of the cell'}" for line, ranks in ranks_at.items()
    )
