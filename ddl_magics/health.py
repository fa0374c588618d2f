"""Whether the process group can be used, and making it anew before the next cell where it cannot.

It cannot after ranks were freed from a collective, and also when ranks have made different numbers of collectives: the
next ones would meet the wrong ones and hang, or worse, succeed. Variables are kept; models of `ddl.prepare` go on.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ipyparallel as ipp

from ddl_magics import waits
from ddl_magics.errors import CellInterrupted, DDLError, RecoveryError
from ddl_magics.ladder import presses_counted
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

END_S = 10.0
"""Seconds that they have to end an attempt that failed."""

MESSAGES = re.compile(rf"\b({'|'.join(sorted(waits.MESSAGES | {'P2POp'}))})\b")
"""Point-to-point calls, which no group counts: one may be left behind unread when a cell fails."""

HALF = "some of its weights have moved, others have not"


@dataclass(frozen=True)
class Damage:
    """What must be mended before the next cell."""

    cell: int
    """After which."""
    why: str
    group: bool = True
    """The process group must be made anew; else only models are brought to the beginning of a step."""


class Health:
    """Of the process group of one cluster."""

    def __init__(self, cluster: Cluster, deaths: Deaths) -> None:
        self._cluster = cluster
        self._deaths = deaths
        self._counts = {fact["rank"]: fact["groups"] for fact in cluster.facts}
        self._damage: Damage | None = None
        self._last = 0
        """The last cell that ended."""
        self._attempts = 0
        self._futures: dict[int, Future[Any]] = {}
        """Of the last attempt, by rank."""
        self.presses = 0
        """How often Stop was pressed during it."""
        self.mended_after = 0
        """The last cell after which the group was made anew; 0: none yet."""

    def note(self, request: CellRequest, outcomes: Iterable[Outcome], silent: Iterable[int]) -> None:
        """A cell has ended with these outcomes; `silent` ranks have not ended it."""
        outcomes = list(outcomes)
        self._last = request.cell
        self._counts |= {outcome.rank: outcome.groups for outcome in outcomes}
        failed = any(outcome.status != "ok" for outcome in outcomes)
        if any(outcome.broken for outcome in outcomes) or list(silent):
            self._add(Damage(request.cell, "collectives were cut off"))
        elif failed and MESSAGES.search(request.code):
            self._add(Damage(request.cell, "a message may have been left unread"))
        elif out_of_step(self._counts):
            self._add(Damage(request.cell, "ranks made different numbers of collectives"))
        elif any(outcome.unsettled for outcome in outcomes):
            self._add(Damage(request.cell, "a training step was cut off", group=False))

    def cut_off(self) -> None:
        """Connections were closed between cells."""
        self._add(Damage(self._last, "collectives were cut off"))

    def _add(self, damage: Damage) -> None:
        if self._damage is None or (damage.group and not self._damage.group):
            self._damage = damage

    def mend(self, screen: Screen, *, within: bool = False) -> None:
        """Make the group anew where that is needed, and say so; every rank is idle.

        `within`: between two runs of one comparison. Stop waits until that is done, which takes less than a second;
        pressed again it ends the attempt.

        Raises
        ------
        RecoveryError
            It could not be made; the next cell tries again.
        KeyboardInterrupt
            Stop was pressed meanwhile.
        """
        damage = self._damage
        if damage is None:
            return
        self.presses = 0
        with presses_counted(self):
            try:
                told = self._attempt(damage, within)
            except (DDLError, TimeoutError, ipp.RemoteError) as error:
                self._deaths.check()
                msg = f"after In[{damage.cell}] the process group could not be made anew: {_in_short(error)}"
                raise RecoveryError(msg, "Run the cell again to try again, or %ddl restart") from error
            finally:
                self._end()
        screen.write("stderr", "\n".join(_said(damage, told)) + "\n")
        self._counts = {rank: recovered["groups"] for rank, recovered in told.items()}
        self._damage = None
        if damage.group:
            self.mended_after = damage.cell
        if self.presses:
            raise CellInterrupted("the cell was stopped before it began")

    def _attempt(self, damage: Damage, within: bool) -> dict[int, dict[str, Any]]:
        """What each rank told of its recovery."""
        self._deaths.check()
        if not self._ended():
            raise TimeoutError("the ranks have not ended the attempt before this one")
        self._attempts += 1
        ranks = dict.fromkeys(range(self._cluster.n), (f"attempt {self._attempts}", damage.group, within))
        self._futures = self._cluster.client.call("ddl_magics.rank.bootstrap:recover", ranks)
        return self._cluster.wait(self._futures, timeout=RECOVER_S, check=self._check)

    def _check(self) -> None:
        self._deaths.check()
        if self.presses > 1:
            raise CellInterrupted("the process group was not made anew; the next cell tries again")

    def _ended(self) -> bool:
        return all(future.done() for future in self._futures.values())

    def _end(self) -> None:
        """See all ranks idle: those that wait for one that failed, or was not called, would wait for ever."""
        deadline = time.monotonic() + END_S
        while not self._ended() and time.monotonic() < deadline:
            # Again and again: a rank may begin to wait after it was freed.
            self._cluster.client.answers("release", list(self._futures), timeout=1.0, reason="the recovery failed")
            wait(self._futures.values(), timeout=0.5)


def _said(damage: Damage, told: dict[int, dict[str, Any]]) -> Iterable[str]:
    """What the user must know, one line for each matter."""
    models = list(told[0]["models"])
    if damage.group:
        kept = f"variables are kept, and {', '.join(models)} of ddl.prepare" if models else "variables are kept"
        yield f"process group made anew after In[{damage.cell}] ({damage.why}); {kept}"
    else:
        yield f"{damage.why} in In[{damage.cell}]: {', '.join(models)} of ddl.prepare begins it again"
    for name in models:
        yield from _apart(name, told)
    closed = {name: why for recovered in told.values() for name, why in recovered["closed"].items()}
    for name, why in closed.items():
        yield f"{name} cannot go on: {why}. Build and prepare it again"
    if told[0]["lost_groups"]:
        yield "groups of dist.new_group, and what was built on them outside ddl.prepare, must be made again"


def _apart(name: str, told: dict[int, dict[str, Any]]) -> Iterable[str]:
    """Why ranks may hold different weights of a model now, or one that has it alone wrong ones, if they may."""
    steps = {rank: recovered["models"][name] for rank, recovered in told.items() if name in recovered["models"]}
    behind = [rank for rank, made in steps.items() if made < max(steps.values())]
    torn = [rank for rank, recovered in told.items() if name in recovered["torn"]]
    look = "%ddl check NAME shows how far it is apart"
    if behind:
        yield f"{in_words(behind)} made fewer optimizer steps of {name} than the others: {look}"
    if torn:
        more = look if len(steps) > 1 else HALF
        yield f"an optimizer step of {name} broke off in its middle on {in_words(torn)}: {more}"


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
