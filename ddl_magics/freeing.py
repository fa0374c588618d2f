"""Frees the ranks of a running cell that wait for one that cannot come, so that no cell waits for ever.

When a rank has failed, those that wait in a collective are freed at once, since nobody will come. A little later the
connections of the rest are shut too: some wait where nothing tells it (messages, a key of the store), and those that
compute go on until they need another rank. When nobody has failed, but ranks have ended the cell for which the others
wait, those are freed after `waits.PATIENCE_S`; from a call of the context also when the missing ones are in another
collective.
Ranks in mismatched collectives of torch's own stay where they are, and the panel says so: one may want to look at them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ddl_magics import waits
from ddl_magics.views.outputs import cause_in_words, place_in_words, waits_in_words
from ddl_magics.views.ranges import in_words

if TYPE_CHECKING:
    from ddl_magics.running import RunningCell

FAILED_S = 0.3
"""Seconds that ranks have to end a cell that has failed on another: most fail alike, and need no help."""

LOOK_S = 0.5
"""Seconds between two looks at ranks that have not ended it."""

TELL_S = 1.5
"""Seconds until the connections of all others are shut; ranks that compute on then are named."""

ANSWER_S = 1.0
"""Seconds that ranks have to tell where they are."""

States = dict[int, dict[str, Any]]


class Freeing:
    """Looks after one running cell; `look` is called all the time and acts when there is need."""

    def __init__(self, running: RunningCell) -> None:
        self._running = running
        self._next_look = 0.0
        self._stuck_since: dict[int, float] = {}
        self._told = False
        self._cut = False
        """The connections of all ranks were shut."""

    def look(self) -> None:
        """Free those who wait in vain. Ranks are asked only where one has failed or is known to wait."""
        running, now = self._running, time.monotonic()
        if running.done or now < self._next_look:
            return
        if 0.0 <= running.since_failure() < FAILED_S:
            return
        if running.failed:
            self._after_failure(running.where(ANSWER_S))
        elif running.some_wait():
            self._in_vain(running.where(ANSWER_S))
        self._next_look = time.monotonic() + LOOK_S

    def _after_failure(self, states: States) -> None:
        running = self._running
        cause = cause_in_words(running.failed)
        waiting = {rank: state for rank, state in states.items() if state["state"] == "waiting"}
        if waiting:
            running.say(f"{cause}; freeing {_places(waiting)}")
            running.release(list(waiting), cause)
            self._told = True
        if running.since_failure() > TELL_S and not self._cut:
            self._cut = True
            running.release(running.waiting, cause)
        elif running.since_failure() > TELL_S + LOOK_S and not self._told:
            running.say(f"{cause}; {in_words(running.waiting)} still in the cell, Stop ends it")
            self._told = True

    def _in_vain(self, states: States) -> None:
        running, now = self._running, time.monotonic()
        ended = [rank for rank in range(running.cluster.n) if rank not in running.waiting]
        stuck = waits.stuck(states, ended)
        hopeless = stuck if ended else {rank for rank in stuck if states[rank]["waiting"]["call"]}
        self._stuck_since = {rank: self._stuck_since.get(rank, now) for rank in hopeless}
        ripe = {rank: states[rank] for rank, since in self._stuck_since.items() if now - since >= waits.PATIENCE_S}
        if ripe:
            running.in_vain = f"{_places(ripe)} waited in vain: {self._why(ripe, set(ended))}"
            running.release(list(ripe), running.in_vain)
            self._stuck_since = {}

    def _why(self, ripe: States, ended: set[int]) -> str:
        """What the others did in place of the collective that these ranks are in."""
        running = self._running
        others = [rank for rank in range(running.cluster.n) if rank not in ripe]
        place = next(iter(ripe.values()))["waiting"]
        client = running.cluster.client
        made = client.answers("made", others, ANSWER_S, name=place["group_name"], number=place["number"])
        for rank, what in made.items():
            if what and _differ(what, place):
                return f"in its place {in_words([rank])} made {_tensors(what)}, not {_tensors(place)}"
        return f"{in_words(others)} {'ended the cell without it' if set(others) <= ended else 'went elsewhere'}"


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two collectives at the same place of a sequence can never be the same one."""
    keys = ("name", "shapes", "dtype") if one["name"] in waits.EQUAL_TENSORS else ("name",)
    return any(one[key] != other[key] for key in keys)


def _tensors(collective: dict[str, Any]) -> str:
    """`all_reduce of (3,) Float`."""
    shapes = ", ".join(str(tuple(shape)) for shape in collective["shapes"])
    return f"{collective['name']} of {shapes} {collective['dtype']}" if shapes else str(collective["name"])


def _places(states: States) -> str:
    return waits_in_words({
        rank: place_in_words(state["waiting"]["call"] or state["waiting"]["name"], state["line"], state["of"])
        for rank, state in states.items()
    })  # fmt: skip
