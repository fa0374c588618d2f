"""What a cell's outcomes mean for the user: nothing, or one error, the likely cause first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddl_magics.errors import CellError, CellInterrupted, by_name
from ddl_magics.views import shortage
from ddl_magics.views.outputs import cause_in_words, fold_tracebacks, place_in_words, waits_in_words
from ddl_magics.views.ranges import in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.ladder import Stopped
    from ddl_magics.protocol import Outcome
    from ddl_magics.running import RunningCell

UNPARSED = {"SyntaxError", "IndentationError", "TabError"}


def error_of(outcomes: Sequence[Outcome], stopped: Stopped, running: RunningCell) -> BaseException | None:
    """The error with which a cell ends in the notebook; None when every rank ended it well.

    Parameters
    ----------
    outcomes
        Of the ranks that ended the cell.
    stopped
        Who stopped it, if anybody.
    running
        The cell.
    """
    stuck = f"{in_words(running.waiting)} did not stop" if running.waiting else ""
    restart = "%ddl restart ends the cell" if stuck else ""
    if stopped == "clock":
        said = f"the cell was stopped after {running.request.timeout:g} s{_when_stopped(running)}"
        return CellError(f"{said}; {stuck}" if stuck else said, restart or "Give it more by --timeout")
    failed = running.failed
    released = [outcome for outcome in outcomes if outcome.status == "released"]
    if failed:  # also when the user then stopped the others: this is why they waited
        parts = [cause_in_words(failed), stuck or _freed(released)]
        shown = [_tracebacks(failed, running)]
        if any(outcome.ename in shortage.ERRORS for outcome in failed):
            shown.append(shortage.memory_table(outcomes))
        remedy = restart or _look_into(failed[0], running)
        return CellError("; ".join(filter(None, parts)), remedy, tracebacks="\n\n".join(filter(None, shown)))
    if stopped == "user" or any(outcome.status == "interrupted" for outcome in outcomes):
        said = f"{stuck}; {restart}" if stuck else "the cell was stopped on every rank"
        return CellInterrupted(said + _handling(outcomes))
    if released:
        if running.in_vain:
            remedy = restart or "Every rank must come to each collective, with tensors that fit"
            return CellError(running.in_vain + _handling(outcomes), remedy)
        return _closed(released, running)
    if running.untold:
        return CellError(f"{in_words(running.untold)} ended the cell and did not tell how", "%ddl log shows its output")
    return None


def _look_into(failed: Outcome, running: RunningCell) -> str:
    """How to see more of a failure; empty where the message says all: it does not parse, or is an error of ours."""
    if failed.line is None or failed.ename in UNPARSED or by_name(failed.ename):
        return ""
    if failed.ename in shortage.ERRORS and not running.request.keep_frames:
        return "The frames were dropped to free their memory; %%ddl --keep-frames keeps them for %ddl debug"
    return "%ddl debug opens a prompt in the failed frame"


def _handling(outcomes: Sequence[Outcome]) -> str:
    """Errors that ranks were busy with when they were stopped: a collective in a `finally` can hide the cause."""
    met: dict[str, list[int]] = {}
    for outcome in outcomes:
        if outcome.before:
            met.setdefault(outcome.before, []).append(outcome.rank)
    return "".join(f"; {in_words(ranks)} had met {error}" for error, ranks in met.items())


def _closed(released: Sequence[Outcome], running: RunningCell) -> CellError:
    """Nobody failed or stopped the cell, and yet connections were closed: of a group that is gone, most likely."""
    if not running.mended_after:
        return CellError(cause_in_words(released), "", _tracebacks(released, running))
    message = f"{_in_places(released)}: a process group from before In[{running.mended_after}] was used, which is gone"
    remedy = (
        "Make it again, with what was built on it (dist.new_group, DistributedDataParallel, deepspeed.initialize); "
        "models of ddl.prepare go on by themselves"
    )
    return CellError(message, remedy, _tracebacks(released, running))


def _tracebacks(outcomes: Sequence[Outcome], running: RunningCell) -> str:
    folded = fold_tracebacks(outcomes, labelled=len(running.stream.ranks) > 1)
    return "\n\n".join(text for _, text in folded)


def _freed(released: Sequence[Outcome]) -> str:
    """Who was freed from where, in one line."""
    if not released:
        return ""
    return f"freed: {_in_places(released)}; variables are kept"


def _in_places(released: Sequence[Outcome]) -> str:
    waited = {o.rank: ((o.waiting.call or o.waiting.name) if o.waiting else "") or "a collective" for o in released}
    return waits_in_words({o.rank: place_in_words(waited[o.rank], o.line, o.of) for o in released})


def _when_stopped(running: RunningCell) -> str:
    """Where the ranks were when the cell was stopped."""
    places = {}
    for rank, state in running.places.items():
        waiting = state.get("waiting") or {}
        what = waiting.get("call") or waiting.get("name") or state["source"]
        places[rank] = place_in_words(what, state["line"], state["of"]) if state["line"] else state["state"]
    return f", {waits_in_words(places)}" if places else ""
