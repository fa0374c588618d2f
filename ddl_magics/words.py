"""Completions of what stands behind `%ddl` and `%%ddl`: verbs, options, their values, names of variables and runs.

Options and choices are read from the parsers, so that they are never behind.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ddl_magics import parsing
from ddl_magics.strategies import spec as specs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ddl_magics.parsing import Parser

LINE = re.compile(r"\s*(%%?)ddl\s+(.*)$", re.DOTALL)
STAGES = ("zero:1", "zero:2", "zero:3")
VALUES = {"--launcher": ("auto", "mpi", "local"), "--device": ("auto", "cpu", "cuda")}
"""Values of options whose parser takes any text."""


class Words:
    """Completes the line of a magic.

    Parameters
    ----------
    verbs
        The verbs of `%ddl`.
    names
        By verb: what gives the names that its arguments may be, for what has been typed of the last.
    """

    def __init__(self, verbs: Iterable[str], names: Mapping[str, Callable[[str], Iterable[str]]]) -> None:
        self._verbs = sorted(verbs)
        self._names = names

    def complete(self, line: str) -> tuple[int, list[str]] | None:
        """How many characters before the cursor are replaced, and by what; None where the line is not of our magics.

        `line` ends at the cursor.
        """
        match = LINE.match(line)
        if match is None:
            return None
        *before, word = re.split(r"\s+", match[2])
        found = self._of_cell(before, word) if match[1] == "%%" else self._of_verb(before, word)
        if "," in word:  # several strategies, or names in a row
            word = word.rpartition(",")[2]
        return len(word), [one for one in found if one.startswith(word)]

    def _of_cell(self, before: list[str], word: str) -> list[str]:
        return _of_parser(parsing.cell_parser(), before, word) or _options(parsing.cell_parser(), before)

    def _of_verb(self, before: list[str], word: str) -> list[str]:
        if not before:
            return self._verbs
        verb, *before = before
        if verb not in self._verbs:
            return []
        parser = parsing.verb_parser(verb, "")
        found = _of_parser(parser, before, word)
        if found or word.startswith("-"):
            return found
        if verb == "help":
            return [*self._verbs, "ddl"]
        if verb == "strategy":
            return strategies()
        names = sorted(self._names[verb](word.rpartition(",")[2])) if verb in self._names else []
        return names if word else [*names, *_options(parser, before)]


def _of_parser(parser: Parser, before: list[str], word: str) -> list[str]:
    """Values of the option that was typed last, or options where one has begun."""
    last = before[-1] if before else ""
    action = next((a for a in parser.arguments() if last in a.option_strings), None)
    if action is not None and action.nargs != 0:
        return list(action.choices or VALUES.get(last) or (strategies() if last == "--strategy" else ()))
    return _options(parser, before) if word.startswith("-") else []


def _options(parser: Parser, before: list[str]) -> list[str]:
    """Options that were not given yet."""
    actions: list[Any] = parser.arguments()
    return [action.option_strings[-1] for action in actions
            if action.option_strings and not set(action.option_strings) & set(before)]  # fmt: skip


def strategies() -> list[str]:
    """Strategies as one types them."""
    return sorted({*specs.names(), *STAGES})
