"""What the panel says, before it is drawn: the same sentences and figures for HTML, a terminal and plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddl_magics.telemetry.runs import SEVERITY
from ddl_magics.views import format as fmt
from ddl_magics.views.memory import MemoryPicture, memory_picture
from ddl_magics.views.palette import STATES
from ddl_magics.views.ranges import in_words, ranges

if TYPE_CHECKING:
    from ddl_magics.protocol import Outcome
    from ddl_magics.telemetry.series import Curve
    from ddl_magics.telemetry.snapshot import RankView, RunView

MAX_SCALARS = 8
MAX_NOTES = 8
MAX_WHERE = 8
MAX_SOURCE = 80
"""Characters of a source line or message that are shown."""
HELD_UP = 3.0
"""Seconds for which all but a few ranks must wait before the panel says who holds them up."""


@dataclass(frozen=True)
class Where:
    """Ranks that are in the same state."""

    state: str
    """A key of `palette.STATES`."""
    who: str
    doing: str
    at: str


@dataclass(frozen=True)
class Panel:
    """Everything the panel shows, in words and numbers."""

    strategy: str
    about: str
    """Run, ranks, nodes, precision, batch."""
    status: str
    """How the run ended, or how long it will go on."""
    failed: bool
    done: float | None
    """Share of the steps that are done; None where their number is not known."""
    position: str
    """`step 320 of 500`; empty where the cell does not use `ddl.track`."""
    speed: str
    """Rate, step time, elapsed and remaining time."""
    memory: MemoryPicture
    loss: Curve | None
    loss_note: str
    total_steps: int | None
    scalars: tuple[Curve, ...]
    more_scalars: int
    where: tuple[Where, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def panel_content(view: RunView) -> Panel:
    """The panel of a run as it stands."""
    progress = view.progress
    loss = view.loss
    others = [c for c in view.curves if c is not loss]
    batch = view.info.batch or next((n for n in view.notes if _is_batch(n)), "")
    notes = [n for n in view.notes if n != batch]
    status, failed = _status(view)
    return Panel(
        strategy=view.info.strategy,
        about=_about(view, batch),
        status=status,
        failed=failed,
        done=min(1.0, progress.step / progress.total) if progress.step is not None and progress.total else None,
        position=_position(view),
        speed=_speed(view),
        memory=memory_picture(view.ranks),
        loss=loss,
        loss_note=_loss_note(loss) if loss else "",
        total_steps=progress.total,
        scalars=tuple(others[:MAX_SCALARS]),
        more_scalars=max(0, len(others) - MAX_SCALARS),
        where=_outcomes(view.ranks) if view.finished else _states(view.ranks),
        warnings=tuple(_warnings(view)),
        notes=(*notes[:MAX_NOTES], *([f"... and {len(notes) - MAX_NOTES} more"] if len(notes) > MAX_NOTES else [])),
    )


def _is_batch(note: str) -> bool:
    return note.startswith(("global batch", "batch")) and len(note) <= 60


def _about(view: RunView, batch: str) -> str:
    info = view.info
    hosts = list(dict.fromkeys(_short(r.info.host) for r in view.ranks if r.info.host))
    nodes = max(info.nodes, len(hosts))
    place = f"{fmt.plural(len(view.ranks), 'rank')} on {fmt.plural(nodes, 'node')}"
    if 0 < len(hosts) <= 4:
        place += f" ({', '.join(hosts)})"
    precision = "fp32" if info.precision == "32" else info.precision
    parts = [f"run “{info.name}”" if info.name and info.name != info.strategy else "", place, precision, batch]
    return " · ".join(part for part in parts if part)


def _status(view: RunView) -> tuple[str, bool]:
    took = fmt.clock(view.progress.elapsed)
    if not view.finished:
        remaining = view.progress.remaining
        return (f"{fmt.clock(remaining)} to go" if remaining is not None else f"{took} so far"), False
    by_status: dict[str, list[int]] = {}
    for rank in view.ranks:
        if rank.outcome is not None:
            by_status.setdefault(rank.outcome.status, []).append(rank.info.rank)
    for status, verb in (("dead", "died"), ("error", "failed"), ("interrupted", "interrupted")):
        if status in by_status:
            return f"{in_words(by_status[status])} {verb} after {took}", True
    return f"finished in {took}", False


def _position(view: RunView) -> str:
    p = view.progress
    if p.step is None:
        return ""
    epoch = f" · epoch {min(p.epoch + 1, p.epochs)} of {p.epochs}" if p.epochs > 1 else ""
    return f"step {p.step:,}" + (f" of {p.total:,}" if p.total is not None else "") + epoch


def _speed(view: RunView) -> str:
    p = view.progress
    parts = []
    if p.tokens_per_second is not None:
        parts.append(f"{fmt.rate(p.tokens_per_second)} tokens/s")
    elif p.samples_per_second is not None:
        parts.append(f"{fmt.rate(p.samples_per_second)} samples/s")
    if p.seconds_per_step is not None:
        slowest = f" (rank {p.slowest[0]} slowest, {fmt.duration(p.slowest[1])})" if p.slowest else ""
        parts.append(f"{fmt.duration(p.seconds_per_step)} a step{slowest}")
    if not view.finished:
        parts.append(f"{fmt.clock(p.elapsed)} elapsed")
    return " · ".join(parts)


def _loss_note(curve: Curve) -> str:
    count = len(curve.ranks)
    return f"mean of {count} ranks, band: min to max" if count > 1 else f"of {in_words(curve.ranks)}"


def _warnings(view: RunView) -> list[str]:
    out = []
    for curve in view.curves:
        if curve.wild:
            times = fmt.plural(curve.wild, "time")
            out.append(f"{curve.name} was NaN or infinite {times}, first at step {curve.first_wild:,}")
    if view.lost:
        who = in_words(r.info.rank for r in view.ranks if r.lost)
        out.append(f"{fmt.plural(view.lost, 'record')} of {who} never came: the picture has gaps")
    if not view.finished and (held := _held_up(view.ranks)):
        out.append(held)
    return out


def _held_up(ranks: tuple[RankView, ...]) -> str:
    waiting = [r for r in ranks if r.state == "waiting"]
    running = [r for r in ranks if r.state == "running"]
    if not running or len(running) >= len(waiting) or min(r.since for r in waiting) < HELD_UP:
        return ""
    return f"{in_words(r.info.rank for r in running)} {'holds' if len(running) == 1 else 'hold'} up the others"


def _states(ranks: tuple[RankView, ...]) -> tuple[Where, ...]:
    """Running ranks in one row, whatever their lines: they change all the time. Others by what they stand at."""
    groups: dict[tuple[str, int | None, str], list[RankView]] = {}
    for rank in ranks:
        settled = rank.sample if rank.state not in ("running", "idle") else None
        key = (rank.state, settled.line if settled else None, settled.source.strip() if settled else "")
        groups.setdefault(key, []).append(rank)
    rows = []
    for (state, line, source), members in groups.items():
        waited = max(r.since for r in members)
        doing = STATES.get(state, ("", state))[1]
        if state == "running" and len(members) == 1:
            doing = "runs"
        elif state == "waiting":
            doing = f"{'waits' if len(members) == 1 else 'wait'} {fmt.waited(waited)}"
        at = _at(line, source) if line is not None else _lines(members)
        rows.append(Where(state, in_words(r.info.rank for r in members), doing, at))
    return _capped(rows)


def _lines(members: list[RankView]) -> str:
    """`cell line 7: batch = augment(batch)`, or with several lines `cell lines 7, 9`."""
    at = {(r.sample.line, r.sample.source.strip()) for r in members if r.sample and r.sample.line is not None}
    if len(at) == 1:
        return _at(*at.pop())
    return f"cell lines {ranges(line for line, _ in at if line is not None)}" if at else ""


def _outcomes(ranks: tuple[RankView, ...]) -> tuple[Where, ...]:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        outcome = rank.outcome
        if outcome is not None:
            at = f"cell line {outcome.line}" if outcome.line is not None else ""
            groups.setdefault((outcome.status, _message(outcome), at), []).append(rank.info.rank)
    rows = []
    for (status, message, at), members in sorted(groups.items(), key=lambda item: SEVERITY.index(item[0][0])):
        rows.append(Where(status, in_words(members), STATES[status][1] + (f": {message}" if message else ""), at))
    return _capped(rows)


def _message(outcome: Outcome) -> str:
    if outcome.status not in ("error", "dead"):
        return ""
    return cut(": ".join(part for part in (outcome.ename, outcome.evalue) if part))


def _capped(rows: list[Where]) -> tuple[Where, ...]:
    if len(rows) <= MAX_WHERE:
        return tuple(rows)
    left = len(rows) - MAX_WHERE + 1
    return (*rows[: MAX_WHERE - 1], Where("idle", f"{left} more groups", "%ddl status shows all", ""))


def _at(line: int | None, source: str) -> str:
    if line is None:
        return ""
    return f"cell line {line}: {cut(source)}" if source else f"cell line {line}"


def cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_SOURCE else f"{text[: MAX_SOURCE - 3]}..."


def _short(host: str) -> str:
    """The host's own name, without its domain; addresses stay whole."""
    return host if host.replace(".", "").isdigit() else host.split(".", maxsplit=1)[0]
