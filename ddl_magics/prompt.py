"""The debugger's prompt: reads lines of the user through the kernel's own input, and shows what ranks answer.

`input()` in a notebook's kernel asks the front end, in a terminal the terminal. It works on the kernel's main thread
only, and not at all where nobody is there to answer (nbclient, papermill).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from IPython.core.error import StdinNotImplementedError

from ddl_magics.errors import DebugError
from ddl_magics.views.ranges import in_words, ranges

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

LEAVE = {"q", "quit", "exit", "EOF"}
WHICH = re.compile(r"ranks?\s+(all|\d[\d,\s-]*)")
"""`rank 2`, `rank all`, `ranks 0,2-3`: no valid Python, so that the variable `rank` can still be looked at."""

HELP = "Of this prompt: `rank 2`, `rank 0,2-3` or `rank all` says which ranks are asked; `quit` leaves.\n"


class Prompt:
    """Asks the user, and knows which ranks the lines are for."""

    def __init__(self, chosen: Collection[int]) -> None:
        self.chosen = tuple(sorted(chosen))
        self._last = ""

    def ask(self) -> str | None:
        """A line for the chosen ranks, None when the user leaves; an empty one repeats the last, as in pdb.

        Raises DebugError where nobody can be asked, KeyboardInterrupt when the user stops the kernel.
        """
        label = f"rank {self.chosen[0]}" if len(self.chosen) == 1 else f"ranks {ranges(self.chosen)}"
        try:
            line = input(f"ddl {label}> ").strip()
        except EOFError:
            return None
        except StdinNotImplementedError:
            raise cannot_ask() from None
        line = line or self._last
        self._last = line
        return None if line in LEAVE else line

    def choose(self, line: str, ready: Collection[int]) -> str | None:
        """Take a line that says which ranks are asked: what is wrong with it, empty when it is done; None: it is none.

        Parameters
        ----------
        line
            What the user typed.
        ready
            The ranks that can be asked.
        """
        match = WHICH.fullmatch(line)
        if match is None:
            return None
        wanted = set(ready) if match[1] == "all" else _numbers(match[1])
        absent = wanted - set(ready)
        if absent or not wanted:
            return f"{in_words(absent)} cannot be asked, only {in_words(ready)}\n" if absent else f"{HELP}"
        self.chosen = tuple(sorted(wanted))
        return ""


def cannot_ask() -> DebugError:
    """The error of a front end without input."""
    return DebugError(
        "this front end cannot ask for input", '`%ddl debug --rank 1 -c "p x"` runs debugger commands without a prompt'
    )


def labelled(answers: Mapping[int, str]) -> str:
    """Answers as one text: equal ones once, each line with the ranks that gave it; of one rank alone as it is."""
    if len(answers) <= 1:
        return "".join(answers.values())
    by_text: dict[str, list[int]] = {}
    for rank in sorted(answers):
        by_text.setdefault(answers[rank], []).append(rank)
    return "".join(
        f"[{ranges(ranks)}] {line}\n"
        for text, ranks in by_text.items()
        if text
        for line in text.rstrip("\n").split("\n")
    )


def _numbers(text: str) -> set[int]:
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:\s*-\s*(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found
