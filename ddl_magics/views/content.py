"""What the panel says, before it is drawn: the same sentences and figures for HTML, a terminal and plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddl_magics.views import format as fmt
from ddl_magics.views.memory import MemoryPicture, memory_picture
from ddl_magics.views.ranges import in_words
from ddl_magics.views.standing import held_up, standing

if TYPE_CHECKING:
    from ddl_magics.telemetry.series import Curve
    from ddl_magics.telemetry.snapshot import RunView
    from ddl_magics.views.standing import Where

MAX_SCALARS = 8
MAX_NOTES = 8


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
    held_up: tuple[str, ...]
    """Who waits for whom in vain, and what to do."""
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
        where=standing(view),
        held_up=held_up(view),
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
    named = f"run “{info.name}”" if info.name and info.name != info.strategy else ""
    recomputes = "activation checkpointing" if info.checkpoint_activations else ""
    parts = [named, place, precision, recomputes, batch]
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
    for status in ("dead", "error", "interrupted", "released"):
        if status in by_status:
            verb = {"dead": "died", "error": "failed"}.get(status, status)
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
    return out


def _short(host: str) -> str:
    """The host's own name, without its domain; addresses stay whole."""
    return host if host.replace(".", "").isdigit() else host.split(".", maxsplit=1)[0]
