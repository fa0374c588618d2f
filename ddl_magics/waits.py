"""Who waits for whom, from what the ranks say of themselves: pure functions, without words, pictures or a clock.

What a rank says is its answer to the request `state`, or the same keys of its latest record: `state`, `line`, `source`,
`seconds` and `waiting`, the collective that it is in. Ranks meet in a collective when they are in the same one: the
same call at the same place in the sequence of the same process group, with tensors of the same kind. A rank of the
group that is not there is missing, and the others wait for it.

Limits: what happens inside a collective (a slow network, a broken library) is not seen; ranks that are all in one
collective count as at work. Where the group or the other end is unknown (messages, the making of a group) a rank counts
as waiting for all others, and a message as on its way while anybody is at the other end of one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ddl_magics.protocol import Waiting

PATIENCE_S = 10.0
"""Seconds that ranks wait in a collective, and others do not, before anybody makes something of it."""

EQUAL_TENSORS = {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"}
"""Collectives to which every rank must bring a tensor of the same shape and dtype."""
SENDS = {"send", "isend", "send_object_list"}
RECEIVES = {"recv", "irecv", "recv_object_list"}
MESSAGES = {*SENDS, *RECEIVES, "batch_isend_irecv"}
PAIR = 2
GONE = {"dead", "outside"}
"""States of ranks that cannot come."""

Kind = Literal["missing", "different", "unequal", "out of step", "cycle"]
"""`missing`: ranks wait for others that are elsewhere. The rest never meet: `different` collectives, or one with
`unequal` tensors, at the same place of the sequence; `out of step`: one has had more collectives than another; `cycle`:
they wait in several groups for one another."""

Answers = Mapping[int, Mapping[str, Any]]
Meeting = tuple[object, ...]
"""What ranks must have in common to meet."""


@dataclass(frozen=True)
class Party:
    """Ranks that are in the same place."""

    ranks: tuple[int, ...]
    state: str
    """A `State`; or `ended`, the cell is over there; `outside`, not in this cell; `silent`, no answer."""
    line: int | None = None
    source: str = ""
    waiting: Waiting | None = None
    """Its `seconds` are 0: see `seconds`."""
    seconds: float = field(default=0.0, compare=False)
    """For how long, the longest of them."""


@dataclass(frozen=True)
class Holdup:
    """Ranks that wait, and for whom."""

    kind: Kind
    waiting: tuple[Party, ...]
    missing: tuple[Party, ...] = ()
    """Only of the kind `missing`."""
    seconds: float = field(default=0.0, compare=False)
    """For how long it has been so."""

    @property
    def ripe(self) -> bool:
        """Whether it has lasted so long that somebody should make something of it."""
        return self.seconds >= PATIENCE_S

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it the same situation as one seen before, in another step of the same loop too."""
        calls = frozenset((p.ranks, p.line, p.waiting.name if p.waiting else "") for p in self.waiting)
        return self.kind, calls, frozenset(rank for party in self.missing for rank in party.ranks)


def parties(answers: Answers, ended: Collection[int] = ()) -> list[Party]:
    """Ranks by where they are: in one collective at one line, or at one line, or in one state. By their first rank."""
    found: dict[Party, list[int]] = {}
    seconds: dict[Party, float] = {}
    for rank in sorted(answers):
        place = _place(rank, answers, ended)
        found.setdefault(place, []).append(rank)
        seconds[place] = max(seconds.get(place, 0.0), place.seconds)
    return [replace(place, ranks=tuple(ranks), seconds=seconds[place]) for place, ranks in found.items()]


def holdups(answers: Answers, ended: Collection[int] = ()) -> list[Holdup]:
    """Who waits for whom: first those who can never meet, then those who wait for a rank that does not wait itself.

    Parameters
    ----------
    answers
        What each rank says of itself, or `{"state": "outside"}` for ranks that are not in the cell. Ranks that are
        waited for and not in it are called silent.
    ended
        Ranks whose cell is over.
    """
    floor = _Floor(answers, ended)
    never = _mismatches(floor)
    told = {rank for holdup in never for party in holdup.waiting for rank in party.ranks}
    cycle = _cycle(floor, _stuck(floor) - told)
    if cycle:
        never.append(cycle)
        told |= {rank for party in cycle.waiting for rank in party.ranks}
    missing = []
    for meetings in floor.by_group():
        ranks = {rank for meeting in meetings for rank in meeting}
        absent = floor.absent(meetings[0][0]) - ranks
        if absent and not ranks <= told:
            waiting = floor.parties(ranks)
            missing.append(Holdup("missing", waiting, floor.parties(absent), max(p.seconds for p in waiting)))
    # Who waits for a rank that waits for another is a consequence, and comes after the cause.
    missing.sort(key=lambda h: (sum(party.state == "waiting" for party in h.missing), -h.seconds))
    return [*never, *missing]


def stuck(answers: Answers, ended: Collection[int] = ()) -> set[int]:
    """Ranks that wait for nobody who can still come.

    Everybody who is missing in their collective has ended the cell, or waits in another collective and is stuck as
    well. While one of the missing is still at work nobody is: it may come, or fail with the true cause.

    Parameters
    ----------
    answers
        What each rank says of itself; a rank that is not in it, and has not ended, may still come.
    ended
        Ranks whose cell is over.
    """
    return _stuck(_Floor(answers, ended))


def _stuck(floor: _Floor) -> set[int]:
    gone = floor.ended | {rank for rank, answer in floor.answers.items() if answer["state"] in GONE}
    held = floor.held()
    while free := {rank for rank in held if floor.absent(rank) - gone - held}:
        held -= free
    return held


def waiting_of(answer: Mapping[str, Any]) -> Waiting | None:
    """The collective that a rank waits in; None where it does not."""
    waiting = answer.get("waiting")
    if answer["state"] != "waiting" or waiting is None:
        return None
    return waiting if isinstance(waiting, Waiting) else Waiting.from_wire(waiting)


def _place(rank: int, answers: Answers, ended: Collection[int]) -> Party:
    answer = answers[rank]
    state = answer["state"]
    if rank in ended and state not in GONE:
        return Party((), "ended")
    waiting = waiting_of(answer)
    seconds = waiting.seconds if waiting else answer.get("seconds", 0.0)
    if state in {*GONE, "idle", "silent"}:
        return Party((), state, seconds=seconds)
    source = (answer.get("source") or "").strip()
    return Party((), state, answer.get("line"), source, waiting and replace(waiting, seconds=0.0), seconds)


class _Floor:
    """Who meets whom, of what the ranks say of themselves at one moment."""

    def __init__(self, answers: Answers, ended: Collection[int]) -> None:
        self.answers = answers
        self.ended = set(ended)
        self.everybody = {*answers, *ended}
        self.waiting = {
            rank: w for rank in sorted(answers) if rank not in self.ended and (w := waiting_of(answers[rank]))
        }
        self.meetings: dict[Meeting, list[int]] = {}
        self.of_rank: dict[int, Meeting] = {}
        for rank, waiting in self.waiting.items():
            self.of_rank[rank] = meeting = self._meeting(rank, waiting)
            self.meetings.setdefault(meeting, []).append(rank)
        self._absent = {meeting: self._find_absent(meeting) for meeting in self.meetings}

    def one(self, ranks: Iterable[int]) -> Waiting:
        """What ranks that met are in."""
        return self.waiting[next(iter(ranks))]

    def absent(self, rank: int) -> set[int]:
        """For whom a rank waits: those of its group who are not where it is."""
        return self._absent[self.of_rank[rank]]

    def held(self) -> set[int]:
        """Ranks that wait for somebody."""
        return {rank for rank in self.waiting if self.absent(rank)}

    def parties(self, ranks: Iterable[int]) -> tuple[Party, ...]:
        return tuple(parties({rank: self.answers.get(rank, {"state": "silent"}) for rank in ranks}, self.ended))

    def by_group(self) -> list[list[list[int]]]:
        """Ranks that met, together with those who met elsewhere in the same process group, where that is known."""
        found: dict[object, list[list[int]]] = {}
        for meeting, ranks in self.meetings.items():
            waiting = self.one(ranks)
            known = waiting.group and waiting.name not in MESSAGES
            found.setdefault((waiting.group_name, waiting.group) if known else meeting, []).append(ranks)
        return list(found.values())

    def least(self, ranks: Iterable[int]) -> float:
        """Seconds for which all of them have been where they are."""
        return min(self.waiting[rank].seconds for rank in ranks)

    def _find_absent(self, meeting: Meeting) -> set[int]:
        ranks = self.meetings[meeting]
        waiting = self.one(ranks)
        others = set(waiting.group or self.everybody) - set(ranks)
        if waiting.name in MESSAGES and len(waiting.group) != PAIR:
            # The other end is none of those who do the same; where all do the same, each waits for the rest.
            return set() if self._answered(waiting.name) else others or set(ranks)
        return others

    def _meeting(self, rank: int, waiting: Waiting) -> Meeting:
        group = (waiting.group_name, waiting.group)
        if waiting.name in MESSAGES:
            if len(waiting.group) != PAIR:
                return (*group, waiting.name)
            peer = next((other for other in waiting.group if other != rank), rank)
            return (*group, "message", (rank, peer) if waiting.name in SENDS else (peer, rank))
        tensors = (waiting.shapes, waiting.dtype) if waiting.name in EQUAL_TENSORS else ()
        return (*group, waiting.number, waiting.name, tensors)

    def _answered(self, name: str) -> bool:
        """Whether a message whose other end is not known may be on its way: somebody is at the other end of one."""
        names = {waiting.name for waiting in self.waiting.values()}
        return bool(names & (RECEIVES if name in SENDS else SENDS if name in RECEIVES else MESSAGES - {name}))


def _mismatches(floor: _Floor) -> list[Holdup]:
    """Ranks of one group that are in collectives which can never be the same one."""
    found = []
    for several in floor.by_group():
        if len(several) >= PAIR:
            everybody = sum(map(len, several)) == len(floor.one(several[0]).group)
            kind, who = _mismatch(floor, several, everybody=everybody)
            if kind:
                waiting_parties = tuple(party for ranks in who for party in floor.parties(ranks))
                found.append(
                    Holdup(kind, waiting_parties, seconds=floor.least(rank for ranks in who for rank in ranks))
                )
    return found


def _mismatch(floor: _Floor, several: list[list[int]], *, everybody: bool) -> tuple[Kind | None, list[list[int]]]:
    """How meetings of one group differ, and whose they are.

    A rank may be ahead of another rightly (the source of a broadcast does not wait for all), as long as somebody for
    whom the one behind may wait is still on the way: being out of step shows only when `everybody` waits.
    """
    by_number: dict[int, list[list[int]]] = {}
    for ranks in several:
        by_number.setdefault(floor.one(ranks).number, []).append(ranks)
    for same in by_number.values():
        if len(same) >= PAIR:
            names = {floor.one(ranks).name for ranks in same}
            return ("unequal" if len(names) == 1 else "different"), same
    return ("out of step" if everybody else None), several


def _cycle(floor: _Floor, stuck_ranks: Collection[int]) -> Holdup | None:
    """Meetings of different groups, or messages, each of which waits for a rank that is in the next one."""
    for start in sorted(stuck_ranks):
        path: list[Meeting] = []
        meeting: Meeting | None = floor.of_rank[start]
        while meeting is not None and meeting not in path:
            path.append(meeting)
            ahead = sorted(floor.absent(floor.meetings[meeting][0]) & set(stuck_ranks))
            meeting = floor.of_rank[ahead[0]] if ahead else None
        if meeting is not None:
            ranks = [rank for m in path[path.index(meeting) :] for rank in floor.meetings[m]]
            return Holdup("cycle", floor.parties(sorted(ranks)), seconds=floor.least(ranks))
    return None
