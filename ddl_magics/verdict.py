"""What a cell's outcomes mean for the user: nothing, or one error, the likely cause first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddl_magics.errors import CellError, DDLError, RankDiedError
from ddl_magics.protocol import Outcome
from ddl_magics.views.outputs import fold_tracebacks
from ddl_magics.views.ranges import in_words


def error_of(outcomes: Sequence[Outcome], printed: str, *, labelled: bool = True) -> DDLError | None:
    """The error with which the cell ends in the notebook; None when every rank ended well.

    Parameters
    ----------
    outcomes
        Of the ranks that ended the cell.
    printed
        What the launcher printed: of a rank that died it knows the signal.
    labelled
        Whether tracebacks say of which rank they are.
    """
    dead = [outcome for outcome in outcomes if outcome.status == "dead"]
    if dead:
        return death(min(dead, key=lambda outcome: outcome.failed_at or float("inf")).rank, printed)
    failed = sorted((o for o in outcomes if o.status != "ok"), key=lambda o: o.failed_at or 0.0)
    if not failed:
        return None
    cause = failed[0]
    same = [o.rank for o in failed if (o.ename, o.evalue, o.line) == (cause.ename, cause.evalue, cause.line)]
    others = [o for o in failed if o.rank not in same]
    place = f" in line {cause.line} of the cell" if cause.line else ""
    message = f"{in_words(same)} failed{place} with {cause.ename}: {_short(cause.evalue)}"
    if others:
        message += f"; {in_words([o.rank for o in others])} failed after that"
    tracebacks = "\n\n".join(text for _, text in fold_tracebacks(failed, labelled=labelled))
    return CellError(message, tracebacks=tracebacks)


def death(rank: int, printed: str) -> RankDiedError:
    """A rank's process has ended: how, by the launcher's words, and what that means."""
    return RankDiedError(
        f"rank {rank} died{how_it_ended(printed)}; MPI ended the other ranks, and variables on the ranks are lost",
        "%ddl restart starts them again",
    )


def how_it_ended(printed: str) -> str:
    """Signal or exit code of a rank in the launcher's words (Open MPI 4 and 5, MPICH), with the usual cause."""
    signalled = re.search(r"(?:exited on|killed by|terminated by|EXIT STRING: [^(]*\()\s*signal (\d+)[: ]*\(?([\w ]+)?", printed)
    if signalled:
        number, name = signalled.group(1), (signalled.group(2) or "").strip()
        hint = {"9": ", often by the kernel for lack of memory", "11": ", a fault in C or C++ code"}.get(number, "")
        return f" (signal {number}{' ' + name if name else ''}{hint})"
    code = re.search(r"(?:Exit code:\s*|EXIT CODE: |exit code )(\d+)", printed, re.IGNORECASE)
    return f" (exit code {code.group(1)})" if code else ""


def _short(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else ""
    return first if len(first) <= 200 else first[:199] + "…"
