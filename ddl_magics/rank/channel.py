"""How a chat on the ranks meets its user: messages to the notebook, or a prompt in a program's terminal.

Messages are of a type of our own (`protocol.CHAT`), part of the cell that runs, and come from rank 0. Limits: a program
needs a terminal on rank 0; where there is none, or it ends, the chat ends.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ddl_magics.protocol import CHAT
from ddl_magics.rank import group, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.rank.conversation import Conversation


def notebook() -> bool:
    """Whether this rank belongs to a notebook."""
    engine = sys.modules.get("ddl_magics.rank.engine")
    return engine is not None and engine.RankKernel.initialized()


def tell(content: dict[str, Any], on: int = 0) -> None:
    """Tell the notebook something of a chat; `on`: the rank that asks, of which only rank 0 is heard."""
    if on == 0:
        from ddl_magics.rank.engine import this_kernel

        this_kernel().publish(CHAT, content)


def converse(chat: Conversation, generate: Callable[..., Any], rank: int) -> None:
    """Ask for messages in rank 0's terminal and answer them until an empty line; all ranks take part."""
    turn = 0
    while True:
        turn += 1
        text = _heard(f"chat/{chat.key}/{turn}", rank)
        if not text:
            return
        chat.answer(text, generate, _print if rank == 0 else None)


def _heard(key: str, rank: int) -> str:
    """What the user typed, on every rank; the others wait at the store, where no collective's time limit applies."""
    opened = group.opened()
    if opened is None or opened.world.world_size == 1:
        return _typed()
    typed, others = "", opened.world.world_size - 1
    with together.in_turn(group.shared_store(), key, goes_first=rank == 0, others=others):
        if rank == 0:
            typed = _typed()
    return str(together.all_gather(typed)[0])


def _typed() -> str:
    try:
        return input("you> ").strip()
    except EOFError:
        return ""


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
