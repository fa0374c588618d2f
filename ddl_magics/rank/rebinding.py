"""Strategies and prepared models go over to a process group that was made anew, each on all ranks or on none.

Ranks may differ in what they have: the one that failed has perhaps not made the model that the others wait to make.
And one may fail in the middle of a collective of the others. So ranks agree through the store before and after each
piece; a rank that fails shuts its connections, which frees the others. What failed anywhere is closed everywhere, the
group is made anew once more, and the rest begins again. Models of a strategy that is `alone` are no other rank's
matter: each rank sees to its own, after all that.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank import group, pairs
from ddl_magics.rank.agreement import Agreement

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.rank.registry import Models
    from ddl_magics.rank.training import Training
    from ddl_magics.strategies.base import Strategy

GONE = "the process group was made anew"


class _FailedSomewhereError(Exception):
    """A piece could not be taken over on some rank; the reason is the same on all."""


@dataclass
class Rebinding:
    """One taking over of everything that a rank has; a collective of all ranks.

    Parameters
    ----------
    models
        Prepared models; those that cannot go on are closed.
    strategies
        By spec; those that cannot go on are closed and taken out.
    close
        Closes either, and never raises.
    new_group
        The group is another than the one they use. Else models only begin a step again.
    """

    models: Models
    strategies: dict[str, Strategy]
    close: Callable[..., None]
    new_group: bool = True
    closed: dict[str, str] = field(default_factory=dict)
    """Name of a model that had to be closed -> why."""

    def __post_init__(self) -> None:
        self.names = {training: name for name, training in self.models.names().items()}
        """Rank 0's name for each model, where it has the model; of a model that is not here nothing is told."""

    def run(self) -> None:
        """Take over everything that can be; the group must be open, and the same on all ranks.

        Raises
        ------
        UsageOnRankError
            A rank was interrupted meanwhile: the group must be made anew and this called again.
        """
        gc.collect()  # what lives only in cycles differs between ranks, and may hold the old group
        while True:
            try:
                self._round(Agreement("rebind"))
            except _FailedSomewhereError:
                group.reopen_group()
                self.new_group = True
            else:
                break
        self._own_models()

    def told(self) -> dict[str, Any]:
        """What became of the models, see `Scope.recover`."""
        going_on = {name: training for training, name in self.names.items() if not training.closed}
        return {
            "models": {name: training.steps for name, training in going_on.items()},
            "torn": [name for name, training in going_on.items() if training.prepared.updates.torn],
            "closed": self.closed,
        }

    def _round(self, agreement: Agreement) -> None:
        if not self._drop_what_others_lack(agreement):
            return
        for text, strategy in list(self.strategies.items()):
            if not strategy.alone:
                why = self._attempt(strategy.rebind, agreement)
                if why:
                    self._close_strategy(text, why)
                    raise _FailedSomewhereError
        for training in self._trainings():
            why = self._attempt(training.rebind, agreement)
            if why:
                self._close_model(training, why)
                raise _FailedSomewhereError

    def _drop_what_others_lack(self, agreement: Agreement) -> bool:
        """Keep what every rank has, in the order of rank 0; a model is known by its strategy, number and kind.

        False, and all is kept, where nothing is to be taken over: a step was cut off of a model that one rank has.
        """
        own = {training.key: training for training in self._trainings()}
        texts = [text for text, strategy in self.strategies.items() if not strategy.alone]
        names = {key: self.names[training] for key, training in own.items()}
        needed = self.new_group or any(training.unsettled for training in own.values())
        mine = {"strategies": texts, "models": names, "counts": self.models.counts, "needed": needed}
        told = agreement.hear(mine)
        self.names |= {own[key]: name for key, name in told[0]["models"].items() if key in own}
        if not any(of["needed"] for of in told):
            for key in own.keys() - told[0]["models"].keys():
                del self.names[own[key]]
            return False
        self.models.counts = {
            text: max(of["counts"].get(text, 0) for of in told) for text in {t for of in told for t in of["counts"]}
        }
        for key, training in own.items():
            lacking = [rank for rank, of in enumerate(told) if key not in of["models"]]
            if lacking:
                self._close_model(training, f"{GONE}, and {_these(lacking)} no such model")
        for text in texts:
            if not all(text in of["strategies"] for of in told):
                self._close_strategy(text, GONE)
        self.models.sort(list(told[0]["models"]))
        order = [text for text in told[0]["strategies"] if text in self.strategies]
        self.strategies |= {text: self.strategies.pop(text) for text in order}
        return True

    def _own_models(self) -> None:
        """Bring the models that only this rank has to the beginning of a step."""
        for training in self.models.live():
            if not training.closed and training.prepared.strategy.alone:
                try:
                    training.rebind()
                except Exception as error:  # noqa: BLE001 - a library may fail in any way
                    self._close_model(training, f"half a step could not be undone ({type(error).__name__}: {error})")

    def _attempt(self, action: Callable[[], None], agreement: Agreement) -> str:
        """Do it on all ranks; returns why it failed, where it failed anywhere, the same on all ranks."""
        failure: dict[str, Any] | None = None
        interrupt: KeyboardInterrupt | None = None
        try:
            action()
        except KeyboardInterrupt as error:
            interrupt, failure = error, {"time": time.time(), "why": "interrupted", "interrupted": True}
        except Exception as error:  # noqa: BLE001 - a library may fail in any way, and the others wait
            failure = {"time": time.time(), "why": f"{type(error).__name__}: {error}", "interrupted": False}
        if failure is not None:
            pairs.shut()
        told = agreement.hear(failure)
        failures = [(of["time"], rank, of) for rank, of in enumerate(told) if of is not None]
        if interrupt is not None:
            raise interrupt
        interrupted = [rank for _, rank, of in failures if of["interrupted"]]
        if interrupted:
            raise UsageOnRankError(f"Interrupted on ranks {interrupted} while models were taken over", "Try again.")
        if not failures:
            return ""
        _, rank, first = min(failures)  # the others were freed by it
        return f"{GONE}, and it could not be taken over on rank {rank} ({first['why']})"

    def _trainings(self) -> list[Training]:
        """Models that all ranks take over together."""
        return [one for one in self.models.live() if not one.closed and not one.prepared.strategy.alone]

    def _close_strategy(self, text: str, why: str) -> None:
        for training in self._trainings():
            if training.prepared.strategy is self.strategies[text]:
                self._close_model(training, why)
        self.close(self.strategies.pop(text))

    def _close_model(self, training: Training, why: str) -> None:
        self.closed[self.names[training]] = why
        self.close(training, why)


def _these(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
