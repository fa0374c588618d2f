"""Sees from a cell's syntax tree, before it is sent, where ranks would wait for one another for ever.

Each rank is taken through the cell as far as names, conditions on the rank and loops tell (`statements`,
`expressions`); the collectives that it enters are compared (`meetings`). What is the same on all ranks, whatever it is,
is read both ways, so that only the rank's own say makes a difference. Imports, functions and conditions of
earlier cells are remembered. Limits: values that only running tells, and code of modules, are not followed;
what cannot be told is passed in silence.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from IPython.core.inputtransformer2 import TransformerManager

from ddl_magics.errors import UsageError
from ddl_magics.foresight.meetings import left_out, misses
from ddl_magics.foresight.statements import Statements
from ddl_magics.foresight.values import Class, Function, Value
from ddl_magics.foresight.walk import Item, OverBudgetError, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_RANKS = 64
"""Of a larger world the first ranks are looked at, and the last."""

OF_THE_WHOLE_CELL = re.compile(r"%%(time|timeit|capture|prun)\b")
"""Magics that run the cell's own Python."""
CONTINUED = re.compile(r"\s*([\w\s,.\[\]'\"]+=\s*)?[%!].*\\$")
"""A line of a magic or of the shell that goes on in the next."""


@dataclass(frozen=True)
class Foreseen:
    """One line of a cell at which it would hang."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


class Foresight:
    """Reads the cells of one cluster, in order.

    Parameters
    ----------
    local_ranks
        Of each rank, by rank.
    """

    def __init__(self, local_ranks: Sequence[int]) -> None:
        size = len(local_ranks)
        looked_at = range(size) if size <= MOST_RANKS else [*range(MOST_RANKS - 1), size - 1]
        self._places = [Place(rank, local_ranks[rank], size) for rank in looked_at]
        self._size = size
        self._known: dict[int, dict[str, Value]] = {place.rank: {} for place in self._places}
        self._serial = 0

    def tell(self, code: str, ranks: Sequence[int] | None, say: Callable[[str], None], *, strict: bool) -> None:
        """Say where a cell would hang, one line each. Raises UsageError with the first instead, where `strict`."""
        found = self.read(code, ranks)
        if found and strict:
            more = f" ({len(found) - 1} more such)" if len(found) > 1 else ""
            raise UsageError(f"{found[0]}{more}", "Let every rank reach it, or run the cell without --strict")
        for each in found:
            say(f"{each}\n")

    def read(self, code: str, ranks: Sequence[int] | None = None) -> list[Foreseen]:
        """Where a cell would hang, by line.

        Parameters
        ----------
        code
            As the user sees it: its first line is that of the magic.
        ranks
            Those that run it; None is all.
        """
        tree = parse(code)
        if tree is None or self._size == 1:
            return []
        self._serial += 1
        try:
            return self._read(tree, ranks)
        except (OverBudgetError, RecursionError):
            return []

    def _read(self, tree: ast.Module, ranks: Sequence[int] | None) -> list[Foreseen]:
        chosen = [place for place in self._places if ranks is None or place.rank in ranks]
        found: dict[int, str] = {}
        before = self._known
        for settled in (True, False):
            walks = {place.rank: self._walk(tree, place, before[place.rank], settled) for place in chosen}
            ways = {rank: walk.items for rank, walk in walks.items()}
            found |= misses(ways) | found
            for line, text, block in chain.from_iterable(walk.in_turn for walk in walks.values()):
                found[line] = (
                    f"{text} stands in `with {block}`: rank 0 would wait in it for the others, and they for rank 0"
                )
            missing = [rank for rank in range(self._size) if ranks is not None and rank not in ranks]
            if missing:
                typed = ",".join(map(str, ranks or ()))
                found = left_out(ways, missing, typed) | found
            for way in self._uncalled(tree, walks):
                found = misses(way) | found
            self._known = before | {rank: walk.scopes[0] for rank, walk in walks.items()}
            if not any(walk.assumed for walk in walks.values()):
                break
        return [Foreseen(line, text) for line, text in sorted(found.items())]

    def _walk(self, tree: ast.Module, place: Place, known: dict[str, Value], settled: bool) -> Statements:
        afresh = {
            "rank": Value(place.rank, by_rank=True),
            "local_rank": Value(place.local_rank, by_rank=True),
            "world_size": Value(place.world_size),
        }
        names = {name: value for name, value in known.items() if name not in {"ddl", "device"}}
        walk = Statements(place, names | afresh, self._serial, settled=settled)
        walk.run(tree.body)
        return walk

    @staticmethod
    def _uncalled(tree: ast.Module, walks: dict[int, Statements]) -> list[dict[int, list[Item]]]:
        """The ways of the ranks through each function that the cell defines at its top, and does not call."""
        ways: list[dict[int, list[Item]]] = []
        for statement in tree.body:
            name = getattr(statement, "name", "")
            per_rank: dict[str, dict[int, list[Item]]] = {}
            for rank, walk in walks.items():
                for label, function, owner in _functions(walk.scopes[0].get(name, Value()).it):
                    if id(function.node) in walk.followed or function.serial != walk.serial:
                        continue
                    walk.items, walk.guards, walk.marks, walk.calls, walk.in_turn = [], [], [], [], []
                    walk.run_alone(function, owner)
                    per_rank.setdefault(label, {})[rank] = walk.items
            ways += per_rank.values()
        return ways


def _functions(it: object) -> list[tuple[str, Function, Class | None]]:
    """A function itself, or the methods of a class."""
    if isinstance(it, Function):
        return [(it.node.name, it, None)]
    return [(name, method, it) for name, method in it.methods.items()] if isinstance(it, Class) else []


def parse(code: str) -> ast.Module | None:
    """The tree of a cell with its magics taken out of the way, lines as they were; None where it has none."""
    lines = code.splitlines()
    head = 0
    while head < len(lines) and (not lines[head].strip() or lines[head].lstrip().startswith("#")):
        head += 1
    if head < len(lines) and OF_THE_WHOLE_CELL.match(lines[head]):
        lines[head] = ""
    try:
        plain = TransformerManager().transform_cell(  # type: ignore[no-untyped-call]
            "#\n" + "\n".join(_on_one_line(lines)[1:]) + "\n"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an invalid escape, which the ranks tell
            tree = compile(plain, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):
        return None
    return tree if isinstance(tree, ast.Module) else None


def _on_one_line(lines: list[str]) -> list[str]:
    """Magics over several lines, drawn into the first; empty lines keep the count."""
    drawn: list[str] = []
    owed = 0
    for line in lines:
        if drawn and CONTINUED.match(drawn[-1 - owed]):
            drawn[-1 - owed] = drawn[-1 - owed][:-1] + " " + line.strip()
            drawn.append("")
            owed += 1
        else:
            owed = 0
            drawn.append(line)
    return drawn
