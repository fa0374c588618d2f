"""`%ddl debug` after a cell has failed: a prompt, or given commands, in the failed frames of ranks.

The ranks are idle then, and each line is an errand in their main thread. The frames stay until the next `%%ddl` cell.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from ddl_magics.errors import DebugError
from ddl_magics.prompt import HELP, Prompt, labelled
from ddl_magics.views.ranges import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Future

    from ddl_magics.cluster.cluster import Cluster
    from ddl_magics.views.screen import Screen

COMMAND_S = 120.0
"""Seconds that a command has before it is interrupted."""
ANSWER_S = 3.0
"""Seconds that a rank has to answer an interrupt."""

Chosen = tuple[int, ...] | Literal["all"] | None


class FailedRanks:
    """The ranks on which the last cell failed, and what each looks at.

    Parameters
    ----------
    cluster
        The ranks.
    cut_off
        Called when connections had to be closed, because a command waited in a collective.
    """

    def __init__(self, cluster: Cluster, cut_off: Callable[[], None]) -> None:
        self._cluster = cluster
        self._cut_off = cut_off
        self._begun: set[int] = set()
        told = self._call("failure", range(cluster.n))
        self._failures: dict[int, dict[str, Any]] = {rank: failure for rank, failure in told.items() if failure}
        if not self._failures:
            raise DebugError("there is nothing to debug: no rank failed in the last cell",
                             "breakpoint() in a cell stops it there")  # fmt: skip

    @property
    def ready(self) -> list[int]:
        """Ranks with frames, the likely cause first: an error before ranks that were freed or stopped, then by time."""
        kept = [rank for rank, failure in self._failures.items() if not failure["dropped"]]
        return sorted(kept, key=self._order)

    def _order(self, rank: int) -> tuple[bool, float]:
        failure = self._failures[rank]
        return failure["status"] != "error", failure["failed_at"] or 0.0

    def check(self, wanted: Collection[int]) -> None:
        """Raise DebugError for ranks that cannot be looked into."""
        whole = sorted(set(wanted) - set(self._failures))
        if whole:
            raise DebugError(f"{in_words(whole)} did not fail in the last cell, {in_words(self._failures)} did")
        dropped = [rank for rank in wanted if self._failures[rank]["dropped"]]
        if dropped:
            error = self._failures[dropped[0]]["ename"]
            raise DebugError(f"{in_words(dropped)} dropped the failed frames after {error}, to free their memory",
                             "%%ddl --keep-frames keeps them until the next cell")  # fmt: skip

    def chosen(self, wanted: Chosen) -> list[int]:
        """The ranks to begin with. Raises DebugError."""
        if wanted == "all":
            wanted = tuple(self.ready)
        if not wanted:
            wanted = tuple(sorted(self._failures, key=self._order)[:1])
        self.check(wanted)
        return sorted(wanted)

    def tell(self, ranks: Sequence[int], line: str) -> dict[int, str]:
        """Execute a line on ranks; their answers."""
        self.begin(ranks)
        return self._call("command", ranks, line)

    def begin(self, ranks: Sequence[int]) -> dict[int, str]:
        """Go to the failed frames where that was not done yet: the exception and the place."""
        new = [rank for rank in ranks if rank not in self._begun]
        self._begun |= set(new)
        return self._call("begin", new)

    def _call(self, function: str, ranks: Collection[int], *args: str) -> dict[int, Any]:
        cluster = self._cluster
        futures = cluster.client.call(f"ddl_magics.rank.postmortem:{function}", dict.fromkeys(ranks, args))
        try:
            return cluster.wait(futures, timeout=COMMAND_S)
        except (KeyboardInterrupt, TimeoutError):
            late = [rank for rank, future in futures.items() if not future.done()]
            return self._ended(futures, late)

    def _ended(self, futures: dict[int, Future[Any]], late: list[int]) -> dict[int, Any]:
        """Interrupt a command; close the collective that it may wait in. Raises DebugError when neither helps."""
        client = self._cluster.client
        client.ask("interrupt", late)
        with suppress(TimeoutError):
            return self._cluster.wait(futures, timeout=ANSWER_S)
        client.ask("release", late, reason="a debugger command was stopped")
        self._cut_off()
        with suppress(TimeoutError):
            return self._cluster.wait(futures, timeout=ANSWER_S)
        raise DebugError(f"{in_words(late)} did not end the command", "%ddl restart ends it")


def debug(
    cluster: Cluster, wanted: Chosen, commands: Sequence[str], screen: Screen, cut_off: Callable[[], None]
) -> None:
    """Open the prompt, or execute `commands` where there are any. Raises DebugError."""
    ranks = FailedRanks(cluster, cut_off)
    prompt = Prompt(ranks.chosen(wanted))
    screen.write("stdout", labelled(ranks.begin(prompt.chosen)))
    for line in commands:
        screen.write("stdout", labelled(ranks.tell(prompt.chosen, line)))
    if not commands:
        _converse(ranks, prompt, screen)


def _converse(ranks: FailedRanks, prompt: Prompt, screen: Screen) -> None:
    """Until the user leaves; the notebook's interrupt leaves too."""
    while True:
        try:
            line = prompt.ask()
        except KeyboardInterrupt:
            return
        if line is None:
            return
        wrong = prompt.choose(line, ranks.ready)
        if wrong is not None:
            answer = wrong or labelled(ranks.begin(prompt.chosen) or ranks.tell(prompt.chosen, "here"))
        else:
            answer = labelled(ranks.tell(prompt.chosen, line))
            answer += HELP if line in {"help", "h", "?"} else ""
        screen.write("stdout", answer)
