"""Ranks do a piece of work and decide together whether it went well, so that none waits for one that failed.

Over the default process group, on the CPU. A model of a strategy that is `alone` has one rank, which decides for
itself. Limits: an interrupt, and an error inside a collective, are not talked about: they end the cell on this rank,
and the others are freed.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddl_magics.errors import CheckpointError, DDLError

if TYPE_CHECKING:
    from collections.abc import Callable


class Talk:
    """The ranks of one model.

    Parameters
    ----------
    alone
        It is of this rank alone.
    """

    def __init__(self, *, alone: bool) -> None:
        group = not alone and dist.is_initialized()
        self.rank: int = dist.get_rank() if group else 0
        self.size: int = dist.get_world_size() if group else 1

    def hear(self, value: Any) -> list[Any]:
        """Tell every rank a value that pickles, and give what each told, in rank order; a collective."""
        if self.size == 1:
            return [value]
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, value)
        return told

    def of_first(self, action: Callable[[], Any]) -> Any:
        """Let rank 0 do something and give every rank what it returned."""
        return self.do(action if self.rank == 0 else lambda: None)[0]

    def do(self, action: Callable[[], Any]) -> list[Any]:
        """Do something on every rank and give what each returned, in rank order; where any failed, all raise the same.

        Raises
        ------
        DDLError
            Of the first rank that failed.
        """
        result: Any = None
        failure: DDLError | None = None
        cause: Exception | None = None
        try:
            result = action()
        except DDLError as error:
            failure, cause = error, error
        except Exception as error:  # noqa: BLE001 - of the file system or a library, and the others must hear of it
            failure, cause = _explained(error, self.rank), error
        told = self.hear((result, failure))
        for rank, (_, failed) in enumerate(told):
            if failed is not None:
                raise failed from (cause if rank == self.rank and cause is not failed else None)
        return [result for result, _ in told]


REMEDIES = {
    errno.ENOSPC: "Free space there, or save elsewhere; the checkpoints that were there are whole.",
    errno.EDQUOT: "Free some of your quota, or save elsewhere; the checkpoints that were there are whole.",
    errno.EROFS: "Give a folder on a file system that can be written.",
    errno.EACCES: "Give a folder that you may write.",
    errno.EPERM: "Give a folder that you may write.",
}


def _explained(error: Exception, rank: int) -> CheckpointError:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        said = error.strerror or str(error)
        return CheckpointError(f"Rank {rank}: {said}{where}", REMEDIES.get(error.errno or 0, ""))
    return CheckpointError(f"Rank {rank}: {type(error).__name__}: {error}")
