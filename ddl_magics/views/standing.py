"""Where the ranks stand, for the panel: rows of ranks that do the same, and who waits for whom in vain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddl_magics import waits
from ddl_magics.telemetry.runs import SEVERITY
from ddl_magics.views import format as fmt
from ddl_magics.views.holdups import called, sentences
from ddl_magics.views.palette import STATES
from ddl_magics.views.ranges import in_words, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.protocol import Outcome, Sample
    from ddl_magics.telemetry.snapshot import RankView, RunView

MAX_WHERE = 8
MAX_SOURCE = 80
"""Characters of a source line or message that are shown."""
SHORT_WAIT_S = 1.0
"""A rank that waits for less still counts as running: every collective is waited for a moment."""
SETTLED_S = 3.0
"""Seconds at one line after which a running rank gets a row with those at the same line."""
ADVICE = "%ddl where shows every stack, in a terminal ddl-magics where; Stop ends the cell"


@dataclass(frozen=True)
class Where:
    """Ranks that are in the same state."""

    state: str
    """A key of `palette.STATES`."""
    who: str
    doing: str
    at: str


def standing(view: RunView) -> tuple[Where, ...]:
    """Every rank's state and line; when the cell is over, how it ended on each."""
    return _outcomes(view.ranks) if view.finished else _states(view.ranks, len(view.ranks))


def situations(view: RunView) -> list[waits.Holdup]:
    """Who has waited too long for whom: now, or when a cell was stopped or released that had not failed otherwise."""
    if view.finished and not _ended_by_waiting(view.ranks):
        return []
    answers, ended = {}, set()
    for rank in view.ranks:
        record = rank.before if view.finished else rank.sample
        if record is not None:
            answers[rank.info.rank] = _answer(record, None if view.finished else rank)
        well = rank.outcome is not None and rank.outcome.status == "ok"
        if well if view.finished else rank.ended:
            ended.add(rank.info.rank)
    groups = {answer["waiting"].group for answer in answers.values() if answer["waiting"] is not None}
    outside = {rank for group in groups for rank in group} - {rank.info.rank for rank in view.ranks}
    answers |= {rank: {"state": "outside"} for rank in outside}
    return [holdup for holdup in waits.holdups(answers, ended) if holdup.ripe]


def held_up(view: RunView) -> tuple[str, ...]:
    """Who has waited too long for whom, in words, and what to do; empty where nobody has."""
    said = sentences(situations(view), len(view.ranks))
    return (*said, ADVICE) if said and not view.finished else tuple(said)


def cut(text: str) -> str:
    """The text on one line, of at most MAX_SOURCE characters."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_SOURCE else f"{text[: MAX_SOURCE - 3]}..."


def at_line(line: int | None, source: str) -> str:
    """`cell line 7: batch = augment(batch)`."""
    if line is None:
        return ""
    return f"cell line {line}: {cut(source)}" if source.strip() else f"cell line {line}"


def capped(rows: Sequence[Where], more: str) -> tuple[Where, ...]:
    """The first rows, and how many there are besides; `more`: what shows them."""
    if len(rows) <= MAX_WHERE:
        return tuple(rows)
    left = len(rows) - MAX_WHERE + 1
    return (*rows[: MAX_WHERE - 1], Where("idle", f"{left} more groups", more, ""))


def _ended_by_waiting(ranks: tuple[RankView, ...]) -> bool:
    """Whether nothing but a stop or a release has ended the cell."""
    statuses = {rank.outcome.status for rank in ranks if rank.outcome is not None}
    return bool(statuses & {"interrupted", "released"}) and not statuses & {"error", "dead"}


def _answer(record: Sample, rank: RankView | None) -> dict[str, Any]:
    """A record as the rank's answer now, or as it stood then."""
    waiting = record.waiting
    since = rank.since if rank else waiting.seconds if waiting else 0.0
    if waiting is not None:
        waiting = replace(waiting, seconds=since)
    state = rank.state if rank else record.state
    return {"state": state, "line": record.line, "source": record.source, "seconds": since, "waiting": waiting}


def _states(ranks: tuple[RankView, ...], world: int) -> tuple[Where, ...]:
    """Ranks by what they stand at. Running ranks that change their lines all the time are one row."""
    groups: dict[tuple[str, int | None, str, str], list[RankView]] = {}
    for rank in ranks:
        state, sample = _shown_state(rank), rank.sample
        settled = state not in ("running", "idle") or (state == "running" and rank.since >= SETTLED_S)
        line, source = (sample.line, sample.source.strip()) if sample and settled else (None, "")
        waiting = sample.waiting if sample and state == "waiting" else None
        groups.setdefault((state, line, source, called(waiting, world) if waiting else ""), []).append(rank)
    rows = []
    for (state, line, source, collective), members in groups.items():
        at = at_line(line, source) if line is not None else _lines(members)
        rows.append(Where(state, in_words(r.info.rank for r in members), _doing(state, members, collective), at))
    return capped(rows, "%ddl status shows all")


def _shown_state(rank: RankView) -> str:
    short = rank.state == "waiting" and rank.sample and rank.sample.waiting and rank.since < SHORT_WAIT_S
    return "running" if short else rank.state


def _doing(state: str, members: list[RankView], collective: str) -> str:
    if state == "idle" and all(rank.ended for rank in members):
        return "ended the cell"
    if state == "waiting":
        verb = "waits" if len(members) == 1 else "wait"
        return f"{verb} {fmt.waited(max(r.since for r in members))}" + (f" in {collective}" if collective else "")
    if state == "running" and len(members) == 1:
        return "runs"
    return STATES.get(state, ("", state))[1]


def _lines(members: list[RankView]) -> str:
    """`cell line 7: batch = augment(batch)`, or with several lines `cell lines 7, 9`."""
    at = {(r.sample.line, r.sample.source.strip()) for r in members if r.sample and r.sample.line is not None}
    if len(at) == 1:
        return at_line(*at.pop())
    return f"cell lines {ranges(line for line, _ in at if line is not None)}" if at else ""


def _outcomes(ranks: tuple[RankView, ...]) -> tuple[Where, ...]:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        outcome = rank.outcome
        if outcome is not None:
            at = f"cell line {outcome.line}" if outcome.line is not None else ""
            groups.setdefault((outcome.status, _said(outcome, len(ranks)), at), []).append(rank.info.rank)
    rows = []
    for (status, said, at), members in sorted(groups.items(), key=lambda item: SEVERITY.index(item[0][0])):
        rows.append(Where(status, in_words(members), STATES[status][1] + said, at))
    return capped(rows, "%ddl status shows all")


def _said(outcome: Outcome, world: int) -> str:
    """What follows the word for how the cell ended: the error, or the collective that a rank was freed from."""
    if outcome.status == "released" and outcome.waiting is not None:
        return f" from {called(outcome.waiting, world)}"
    if outcome.status not in ("error", "dead"):
        return ""
    message = cut(": ".join(part for part in (outcome.ename, outcome.evalue) if part))
    return f": {message}" if message else ""
