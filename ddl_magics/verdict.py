"""What a cell's outcomes mean for the user: nothing, or one error, the likely cause first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddl_magics.errors import CellError, CellInterrupted, RankDiedError
from ddl_magics.views.outputs import fold_tracebacks
from ddl_magics.views.ranges import in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.ladder import Stopped
    from ddl_magics.protocol import Outcome
    from ddl_magics.running import RunningCell


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
    if stopped == "clock":
        said = f"the cell was stopped after {running.request.timeout:g} s"
        said += f", but {stuck}" if stuck else ""
        return CellError(said, "%ddl restart ends it" if stuck else "Give it more by --timeout")
    if stopped == "user" or any(outcome.status == "interrupted" for outcome in outcomes):
        return CellInterrupted(f"{stuck}; %ddl restart ends it" if stuck else "the cell was stopped on every rank")
    failed = sorted((o for o in outcomes if o.status != "ok"), key=lambda o: o.failed_at or 0.0)
    if not failed:
        return None
    tracebacks = fold_tracebacks(failed, labelled=len(running.stream.ranks) > 1)
    return CellError(_cause(failed), tracebacks="\n\n".join(text for _, text in tracebacks))


def _cause(failed: Sequence[Outcome]) -> str:
    """Which ranks failed with what, the first in time first."""
    first = failed[0]
    same = [o.rank for o in failed if (o.ename, o.evalue, o.line) == (first.ename, first.evalue, first.line)]
    others = [o.rank for o in failed if o.rank not in same]
    place = f" in line {first.line} of the cell" if first.line else ""
    message = f"{in_words(same)} failed{place} with {first.ename}: {_short(first.evalue)}"
    return f"{message}; {in_words(others)} failed after that" if others else message


def death(dead: Sequence[int], printed: str) -> RankDiedError:
    """Ranks' processes have ended: how, by the launcher's words, and what that means.

    Parameters
    ----------
    dead
        In the order in which it was noticed; empty when all ended at once, by somebody's hand.
    printed
        What the launcher printed: it knows the signal.
    """
    how = f"rank {dead[0]} died{how_it_ended(printed)}; the other ranks ended with it" if dead else (
        "the ranks were ended from outside this notebook")  # fmt: skip
    return RankDiedError(f"{how}, and variables on the ranks are lost", "%ddl restart starts them again")


def how_it_ended(printed: str) -> str:
    """Signal or exit code of a rank in the launcher's words (Open MPI 4 and 5, MPICH), with the usual cause."""
    signalled = re.search(
        r"(?:exited on|killed by|terminated by|EXIT STRING: [^(]*\()\s*signal (\d+)[: ]*\(?([\w ]+)?", printed
    )
    if signalled:
        number, name = signalled.group(1), (signalled.group(2) or "").strip()
        hint = {"9": ", often by the kernel for lack of memory", "11": ", a fault in C or C++ code"}.get(number, "")
        return f" (signal {number}{' ' + name if name else ''}{hint})"
    code = re.search(r"(?:Exit code:\s*|EXIT CODE: |exit code )(\d+)", printed, re.IGNORECASE)
    return f" (exit code {code.group(1)})" if code else ""


def _short(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else ""
    return first if len(first) <= 200 else first[:199] + "…"
