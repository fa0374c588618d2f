"""Brings a running cell to its end: it ends by itself, or the user or the clock stops it, step by step.

Each step is one line on the screen. SIGINT reaches plain Python, also asleep; a rank inside a collective does not hear
it, is named, and a restart is offered.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Literal

from ddl_magics.views.outputs import cause_in_words
from ddl_magics.views.ranges import in_words

if TYPE_CHECKING:
    from ddl_magics.running import RunningCell

Stopped = Literal["", "user", "clock"]
"""Who stopped a cell; empty: it ended by itself."""

ANSWER_S = 2.0
"""Seconds that ranks have to answer an interrupt before they get another."""

TELL_S = 1.5
"""Seconds that the other ranks have to end a cell that has failed on one, before that is said."""

GIVE_UP_S = 5.0
"""Seconds after that until the notebook stops waiting for them and names them."""


def follow(running: RunningCell) -> Stopped:
    """Show a cell until it has ended or is stopped; then `running.done` tells whether all ranks have ended it."""
    stopped: Stopped = ""
    try:
        told = False
        while not running.done and not stopped:
            running.pump()
            told = told or _tell_of_failure(running)
            limit = running.request.timeout
            if limit and time.monotonic() - running.started > limit and not running.done:
                stopped = "clock"
    except KeyboardInterrupt:
        stopped = "user"
    if stopped and not running.done:
        stop(running)
    return stopped


def _tell_of_failure(running: RunningCell) -> bool:
    """Say at once that a rank has failed, where others go on: they may wait for it in a collective."""
    failed = [outcome for outcome in running.outcomes.values() if outcome.status == "error"]
    if not failed or time.time() - min(outcome.failed_at or 0.0 for outcome in failed) < TELL_S:
        return False
    _say(running, f"{cause_in_words(failed)}; {in_words(running.waiting)} still in the cell, Stop ends it")
    return True


def stop(running: RunningCell) -> None:
    """Interrupt the ranks that still run the cell; name those that do not answer."""
    _say(running, f"interrupting {in_words(running.waiting)} ...")
    for patience in (ANSWER_S, GIVE_UP_S):
        running.cluster.client.signal(signal.SIGINT, running.waiting)
        deadline = time.monotonic() + patience
        try:
            while not running.done and time.monotonic() < deadline:
                running.pump()
        except KeyboardInterrupt:
            _say(running, "a second interrupt: no longer waiting")
            break
        if running.done:
            return
    for rank, state in sorted(running.where().items()):
        line = f"line {state['line']}: {state['source']}" if state["line"] else "no line of the cell"
        _say(running, f"rank {rank} does not answer, since {state['seconds']:.0f} s at {line}")


def _say(running: RunningCell, text: str) -> None:
    running.screen.write("stderr", f"{text}\n")
