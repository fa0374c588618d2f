"""What a cell's outcomes mean for the user: nothing, or one error, the likely cause first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddl_magics.errors import CellError, CellInterrupted, RankDiedError
from ddl_magics.views.outputs import cause_in_words, fold_tracebacks
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
        return CellError(said, "%ddl restart ends the cell" if stuck else "Give it more by --timeout")
    failed = [outcome for outcome in outcomes if outcome.status == "error"]
    if failed:  # also when the user then stopped the others: this is why they waited
        tracebacks = fold_tracebacks(failed, labelled=len(running.stream.ranks) > 1)
        cause = cause_in_words(failed) + (f"; {stuck}" if stuck else "")
        remedy = "%ddl restart ends the cell" if stuck else ""
        return CellError(cause, remedy, tracebacks="\n\n".join(text for _, text in tracebacks))
    if stopped == "user" or any(outcome.status == "interrupted" for outcome in outcomes):
        return CellInterrupted(
            f"{stuck}; %ddl restart ends the cell" if stuck else "the cell was stopped on every rank"
        )
    return None


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
