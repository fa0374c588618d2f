"""One rank on its way through a cell: its names, the conditions it stands under, and what it has entered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddl_magics.foresight import names
from ddl_magics.foresight.values import NOTHING, Function, Group, Ref, Value, in_words, names_one_rank, plain

if TYPE_CHECKING:
    import ast


@dataclass(frozen=True)
class Place:
    """One rank of the world."""

    rank: int
    local_rank: int
    world_size: int


@dataclass(frozen=True)
class Guard:
    """A condition on the rank under which the code stands.

    `one`: it holds on a single rank; `depth`: of how many calls it is deep; `test`: which condition it is of;
    `guessed`: on which ranks it holds is a guess.
    """

    words: str
    one: bool
    depth: int
    loop: bool = False
    test: int = 0
    guessed: bool = False


@dataclass(frozen=True)
class Item:
    """A collective that a rank enters."""

    key: str
    text: str
    line: int
    guards: tuple[Guard, ...]
    marks: tuple[Any, ...]
    """Which round of which loop; ranks meet in one collective only in the same."""
    group: Group | None
    """That of a call which is not about all ranks."""


@dataclass(frozen=True)
class Frame:
    """A call of a function of the notebook that is being followed."""

    line: int
    function: Function


class OverBudgetError(Exception):
    """The cell is too large to be followed; nothing is said of it."""


class Walk:
    """One rank on its way through a cell. `settled`: what is assumed of conditions that the rank decides in part."""

    def __init__(self, place: Place, module: dict[str, Value], serial: int, *, settled: bool) -> None:
        self.place = place
        self.scopes: list[dict[str, Value]] = [module]
        self.serial = serial
        self.settled = settled
        self.assumed = False
        """Whether `settled` has mattered."""
        self.items: list[Item] = []
        self.in_turn: list[tuple[int, str, str]] = []
        """(line, collective, block) inside `with ddl.first()`."""
        self.guards: list[Guard] = []
        self.marks: list[Any] = []
        self.turns: list[str] = []
        self.calls: list[Frame] = []
        self.followed: set[int] = set()
        self.to_the_end = False
        """Whether the last loop that has ended was followed in all its rounds."""
        self.budget = 20_000

    def look_up(self, name: str) -> Value:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return Value(Ref(names.PREDEFINED[name])) if name in names.PREDEFINED else NOTHING

    def bound(self, name: str) -> bool:
        return any(name in scope for scope in self.scopes)

    def settle(self, test: Value) -> Value:
        """A condition that the rank decides in part is taken for the whole: as it is assumed."""
        if plain(test.it) or not test.by_rank:
            return test
        self.assumed = True
        return Value(self.settled, test.by_rank, test.guessed)

    def guard(self, test: ast.expr, *, negated: bool, guessed: bool) -> None:
        self.guards.append(
            Guard(
                in_words(test, negated=negated),
                names_one_rank(test, negated=negated, guessed=guessed),
                len(self.calls),
                test=id(test),
                guessed=guessed,
            )
        )

    def rank_of(self, local: bool) -> Value:
        return Value(self.place.local_rank if local else self.place.rank, by_rank=True)

    # What the parts of a walk know of one another.

    def visit(self, node: ast.expr | None) -> Value:
        """Work out an expression."""
        raise NotImplementedError

    def bind(self, target: ast.expr, value: Value) -> None:
        """Give a name, or an attribute of an object of the notebook, its value."""
        raise NotImplementedError

    def run(self, block: list[ast.stmt]) -> str | None:
        """Go through a block; tells how it was left, if early."""
        raise NotImplementedError
