"""Whether the process group can be used, and making it anew before the next cell where it cannot.

It cannot after ranks were freed from a collective, and also when ranks have made different numbers of collectives: the
next ones would meet the wrong ones and hang, or worse, succeed. Variables are kept; models of `ddl.prepare` go on.
"""

from __future__ import annotations

import re
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import ipyparallel as ipp

from ddl_magics.errors import DDLError, RecoveryError
from ddl_magics.views.ranges import in_words

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from ddl_magics.cluster.cluster import Cluster
    from ddl_magics.deaths import Deaths
    from ddl_magics.protocol import CellRequest, Outcome
    from ddl_magics.views.screen import Screen

RECOVER_S = 30.0
"""Seconds that the ranks have to make the group and what holds it anew."""

END_S = 5.0
"""Seconds that they have to end an attempt that failed."""

MESSAGES = re.compile(r"\b(send|recv|isend|irecv|batch_isend_irecv|P2POp|send_object_list|recv_object_list)\b")
"""Point-to-point calls, which no group counts: one may be left behind unread when a cell fails."""


class Health:
    """Of the process group of one cluster."""

    def __init__(self, cluster: Cluster, deaths: Deaths) -> None:
        self._cluster = cluster
        self._deaths = deaths
        self._counts = {fact["rank"]: fact["groups"] for fact in cluster.facts}
        self._broken_in = 0
        """The cell after which the group could not be used any more; 0: it can."""
        self._why = ""
        self._last = 0
        """The last cell that ended."""
        self._attempts = 0
        self.mended_after = 0
        """The last cell after which the group was made anew; 0: none yet."""

    def note(self, request: CellRequest, outcomes: Iterable[Outcome], silent: Iterable[int]) -> None:
        """A cell has ended with these outcomes; `silent` ranks have not ended it."""
        outcomes = list(outcomes)
        self._last = request.cell
        self._counts |= {outcome.rank: outcome.groups for outcome in outcomes}
        failed = any(outcome.status != "ok" for outcome in outcomes)
        if any(outcome.broken for outcome in outcomes) or list(silent):
            self._broken(request.cell, "collectives were cut off")
        elif failed and MESSAGES.search(request.code):
            self._broken(request.cell, "a message may have been left unread")
        elif out_of_step(self._counts):
            self._broken(request.cell, "ranks made different numbers of collectives")

    def cut_off(self) -> None:
        """Connections were closed between cells."""
        self._broken(self._last, "collectives were cut off")

    def _broken(self, cell: int, why: str) -> None:
        if not self._broken_in:
            self._broken_in, self._why = cell, why

    def mend(self, screen: Screen) -> None:
        """Make the group anew where that is needed, and say so; every rank is idle.

        Raises
        ------
        RecoveryError
            It could not be made; the next cell tries again.
        """
        if not self._broken_in:
            return
        self._attempts += 1
        ranks = dict.fromkeys(range(self._cluster.n), (f"attempt {self._attempts}",))
        futures = self._cluster.client.call("ddl_magics.rank.bootstrap:recover", ranks)
        try:
            told = self._cluster.wait(futures, timeout=RECOVER_S, check=self._deaths.check)
        except BaseException as error:
            self._deaths.check()
            self._end(futures)
            if not isinstance(error, (DDLError, TimeoutError, ipp.RemoteError)):
                raise
            msg = f"after In[{self._broken_in}] the process group could not be made anew: {_in_short(error)}"
            raise RecoveryError(msg, "Run the cell again to try again, or %ddl restart") from error
        screen.write("stderr", "\n".join(self._said(told)) + "\n")
        self._counts = {rank: recovered["groups"] for rank, recovered in told.items()}
        self.mended_after, self._broken_in = self._broken_in, 0

    def _end(self, futures: dict[int, Future[Any]]) -> None:
        """Free the ranks that wait for one that failed, and see them idle."""
        self._cluster.client.answers("release", list(futures), timeout=END_S, reason="the recovery failed")
        wait(futures.values(), timeout=END_S)

    def _said(self, told: dict[int, dict[str, Any]]) -> Iterable[str]:
        """What the user must know, one line for each matter."""
        models = list(told[0]["models"])
        kept = f"variables are kept, and {', '.join(models)} of ddl.prepare" if models else "variables are kept"
        yield f"process group made anew after In[{self._broken_in}] ({self._why}); {kept}"
        for name in models:
            yield from _apart(name, told)
        for name, reason in told[0]["closed"].items():
            yield f"{name} cannot go on: {reason}. Build and prepare it again"
        if told[0]["lost_groups"]:
            yield "groups of dist.new_group, and what was built on them outside ddl.prepare, must be made again"


def _apart(name: str, told: dict[int, dict[str, Any]]) -> Iterable[str]:
    """Why ranks may hold different weights of a model now, if they may."""
    steps = {rank: recovered["models"].get(name, 0) for rank, recovered in told.items()}
    behind = [rank for rank, made in steps.items() if made < max(steps.values())]
    torn = [rank for rank, recovered in told.items() if name in recovered["torn"]]
    look = "%ddl check NAME shows how far it is apart"
    if behind:
        yield f"{in_words(behind)} made fewer optimizer steps of {name} than the others: {look}"
    if torn:
        yield f"an optimizer step of {name} broke off in its middle on {in_words(torn)}: {look}"


def out_of_step(counts: dict[int, dict[str, int]]) -> bool:
    """Whether ranks have different groups by a name, or have made different numbers of collectives in one."""
    by_name: dict[str, set[int]] = {}
    for of_rank in counts.values():
        for name, count in of_rank.items():
            by_name.setdefault(name, set()).add(count)
    return any(len(different) > 1 for different in by_name.values())


def _in_short(error: BaseException) -> str:
    if isinstance(error, ipp.RemoteError):
        return f"{error.ename}: {error.evalue}".splitlines()[0]
    return str(error)
