"""When an interrupt is heard: while the user's code runs, and at no other time.

ipykernel hears it during the whole handling of a message. One that comes while a rank says how its cell ended, or that
the kernel takes the next message, would bury the traceback or end the loop that takes messages, for good; and Stop
asks again while it waits, so that a second one often comes then. Main thread only.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


def heard() -> AbstractContextManager[None]:
    """Within it SIGINT raises KeyboardInterrupt."""
    return _handled_by(signal.default_int_handler)


def undisturbed() -> AbstractContextManager[None]:
    """Within it SIGINT does nothing."""
    return _handled_by(signal.SIG_IGN)


@contextmanager
def held() -> Iterator[Callable[[], bool]]:
    """Within it SIGINT raises nothing, and what is given tells whether one came; it is heard at the end.

    For calls of a library that takes an exception for a fault of its own. They should end soon once one came.
    """
    if threading.current_thread() is not threading.main_thread():  # which hears it
        yield lambda: False
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(came[0], None)


@contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        try:
            signal.signal(signal.SIGINT, before)
        except KeyboardInterrupt:  # just before: what it was to end has ended
            signal.signal(signal.SIGINT, before)
