"""Every error a user can meet, each with its remedy.

A `DDLError` is shown as one line, without a traceback of ours: what happened, where, what to do. Classes are
few: one for each kind of thing that a caller may want to tell apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class DDLError(Exception):
    """An error whose message is meant for the user.

    Parameters
    ----------
    message
        What happened, and where.
    remedy
        What to do next; shown after the message.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}" if self.remedy else self.message

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(DDLError):
    """A mistake in what was typed: an unknown verb or option, a value out of range."""


class SpecError(UsageError):
    """A strategy that does not exist or cannot run on this world."""


class StartError(DDLError):
    """The ranks did not come up."""


class NoClusterError(DDLError):
    """A verb or cell needs ranks and there are none."""


class BusyError(DDLError):
    """A cell runs already."""


class DebugError(DDLError):
    """There is nothing to look into, or nobody to ask."""


class RankDiedError(DDLError):
    """A rank's process ended in the middle of the session.

    Parameters
    ----------
    message
        Which rank, how, and what that means.
    title, lines
        What the rank printed last; shown below the message.
    """

    def __init__(self, message: str, remedy: str = "", title: str = "", lines: Sequence[str] = ()) -> None:
        super().__init__(message, remedy)
        self._last = [title, *(f"    {line}" for line in lines)] if lines else []

    def shown(self) -> list[str]:
        """The message, and below it what the rank printed last."""
        return [str(self), *self._last]

    def _render_traceback_(self) -> list[str]:
        return [*super()._render_traceback_(), *self._last]


class RecoveryError(DDLError):
    """The process group could not be made anew after a cell that failed."""


class CellError(DDLError):
    """A `%%ddl` cell failed on at least one rank.

    Parameters
    ----------
    message
        Which ranks failed with what, the likely cause first.
    tracebacks
        The ranks' tracebacks, folded; shown above the message.
    """

    def __init__(self, message: str, remedy: str = "", tracebacks: str = "") -> None:
        super().__init__(message, remedy)
        self.tracebacks = tracebacks

    def _render_traceback_(self) -> list[str]:
        return [*([self.tracebacks, ""] if self.tracebacks else []), *super()._render_traceback_()]


class CellInterrupted(KeyboardInterrupt):
    """A `%%ddl` cell was stopped by the user. Shown as the KeyboardInterrupt that it is, in one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


CellInterrupted.__name__ = "KeyboardInterrupt"


class TransferError(DDLError):
    """A variable cannot be pushed or pulled."""


class UsageOnRankError(DDLError):
    """A call of the context that cannot work as written: `step` before `prepare`, for example."""


class CheckpointError(UsageOnRankError):
    """A checkpoint cannot be written or read, or does not fit; what was there before is as it was."""


def by_name(name: str) -> type[DDLError] | None:
    """The class of ours that a rank's error has, by its name; None for one of another's."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, DDLError) else None


def nearest(word: str, valid: list[str]) -> str:
    """A remedy that names the nearest valid word, or all of them when none is near."""
    import difflib

    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Valid: {', '.join(valid)}."
