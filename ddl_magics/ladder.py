"""Brings a running cell to its end: it ends by itself, or the user or the clock stops it, step by step.

The steps: an interrupt, which reaches plain Python, also asleep; the collectives closed, which frees ranks inside one;
the ranks that do not answer named, with a restart offered. Each is one line on the screen. Stop pressed again goes on
to the next step at once.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ddl_magics.debugging import Stops
from ddl_magics.freeing import Freeing
from ddl_magics.views.ranges import in_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddl_magics.running import RunningCell

Stopped = Literal["", "user", "clock"]
"""Who stopped a cell; empty: it ended by itself."""

PLACES_S = 0.5
"""Seconds that ranks have to say where they are, before they are interrupted."""

ANSWER_S = 2.0
"""Seconds that ranks have to answer an interrupt, before their collectives are closed."""

AGAIN_S = 1.25
"""Seconds after that until both are done again."""

GIVE_UP_S = 5.0
"""Seconds after that until the notebook stops waiting for them and names them."""


def follow(running: RunningCell) -> Stopped:
    """Show a cell until it has ended or is stopped; then `running.done` tells whether all ranks have ended it."""
    stopped: Stopped = ""
    freeing, stops = Freeing(running), Stops(running)
    try:
        while not running.done and not stopped:
            running.pump()
            freeing.look()
            stops.look()
            if running.presses:
                stopped = "user"
            elif running.out_of_time():
                stopped = "clock"
    except KeyboardInterrupt:
        stopped = "user"
    if stopped and not running.done:
        with presses_counted(running):
            stop(running)
    return stopped


def stop(running: RunningCell) -> None:
    """Free the ranks that still run the cell; name those that do not answer."""
    running.stopping = True
    running.places = running.where(PLACES_S)
    running.say(f"interrupting {in_words(running.waiting)} ...")
    if _ended_within(running, ANSWER_S):
        return
    running.say(f"closing the collectives of {in_words(running.waiting)} ...")
    deadline = time.monotonic() + GIVE_UP_S
    while not running.done and time.monotonic() < deadline:
        # Once is not enough: code may swallow an interrupt, or make a new group meanwhile.
        running.release(running.waiting, "the cell was stopped")
        _ended_within(running, AGAIN_S)
    if running.done:
        return
    states = running.where()
    for rank in running.waiting:
        running.say(f"rank {rank} does not answer, {_place(states.get(rank))}")


class Counter(Protocol):
    """Counts how often Stop was pressed."""

    presses: int


@contextmanager
def presses_counted(counter: Counter) -> Iterator[None]:
    """Within it Stop raises nothing, so that nothing is left half done; it counts, and hurries the ladder on."""
    if threading.current_thread() is not threading.main_thread():  # `Cells.wait` counts there
        yield
        return

    def count(*_: object) -> None:
        counter.presses += 1

    before = signal.signal(signal.SIGINT, count)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _ended_within(running: RunningCell, patience: float) -> bool:
    """Interrupt, and wait; whether all ranks have ended the cell then."""
    running.cluster.client.signal(signal.SIGINT, running.waiting)
    presses, deadline = running.presses, time.monotonic() + patience
    while not running.done and running.presses == presses and time.monotonic() < deadline:
        running.pump()
    return running.done


def _place(state: dict[str, Any] | None) -> str:
    if state is None:
        return "not even out of band"
    return f"in line {state['line']}: {state['source']}" if state["line"] else "in no line of the cell"
