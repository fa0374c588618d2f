"""What one rank would find an expression to be, as far as it can be told before the cell runs."""

from __future__ import annotations

import ast
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Unknown:
    """What only running the cell would tell."""


UNKNOWN = Unknown()


@dataclass(frozen=True)
class Ref:
    """Something of a library, by its full name."""

    dotted: str


@dataclass(frozen=True)
class Group:
    """A process group.

    `ranks`: who is in it, None where only running the cell would tell; `foreign`: no cell has been seen to make it, and
    it is taken to be of several ranks.
    """

    ranks: tuple[int, ...] | None = None
    foreign: bool = False


@dataclass
class Function:
    """A function of the notebook. `serial`: of the cell that defines it."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    serial: int
    on_rank_0: bool = False
    decorator: str = ""


@dataclass
class Class:
    """A class of the notebook and its methods."""

    name: str
    methods: dict[str, Function]


@dataclass
class Instance:
    """An object of a class of the notebook."""

    kind: Class
    attributes: dict[str, Value] = field(default_factory=dict)


@dataclass
class Method:
    """A method bound to its object."""

    function: Function
    owner: Instance


@dataclass(frozen=True)
class Value:
    """What an expression is on one rank. `by_rank`: the rank has had a say in it; `guessed`: see `compare`."""

    it: Any = UNKNOWN
    by_rank: bool = False
    guessed: bool = False

    @property
    def known(self) -> bool:
        return not isinstance(self.it, Unknown)


NOTHING = Value()
PLAIN = (int, float, str, bool, type(None), tuple, list, range)
LARGEST = 10**6
"""Numbers beyond it are not worked out: `10 ** 10 ** 10` may stand in a cell."""

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
ON_RANK_0 = (ast.Eq, ast.Lt, ast.LtE, ast.In, ast.Is)
"""Comparisons of the rank with something unknown: taken to hold on rank 0, and their opposites on the others."""


def plain(it: Any) -> bool:
    return isinstance(it, PLAIN)


def compute(op: Callable[[Any, Any], Any], left: Value, right: Value) -> Value:
    """Arithmetic on plain numbers; unknown where it is anything else."""
    by_rank = left.by_rank or right.by_rank
    small = all(isinstance(v.it, int | float) and abs(v.it) < LARGEST for v in (left, right))
    if not small:
        return Value(UNKNOWN, by_rank)
    try:
        return Value(op(left.it, right.it), by_rank)
    except (ArithmeticError, TypeError):
        return Value(UNKNOWN, by_rank)


def compare(ops: Sequence[ast.cmpop], values: Sequence[Value], rank: int) -> Value:
    """A chain of comparisons. One of the rank with something unknown splits the ranks: rank 0 from the others."""
    by_rank = any(value.by_rank for value in values)
    guessed = False
    result: Any = True
    for op, left, right in zip(ops, values, values[1:], strict=False):
        if plain(left.it) and plain(right.it):
            try:
                holds = COMPARISONS[type(op)](left.it, right.it)
            except TypeError:
                return Value(UNKNOWN, by_rank)
        elif left.by_rank or right.by_rank:
            holds = (rank == 0) == isinstance(op, ON_RANK_0)
            guessed = True
        else:
            holds = UNKNOWN
        if holds is False:
            return Value(False, by_rank, guessed)
        result = UNKNOWN if holds is UNKNOWN else result
    return Value(result, by_rank, guessed)


def in_words(test: ast.expr, *, negated: bool = False) -> str:
    """A condition as a reader says it; the opposite of a plain comparison is turned round."""
    if negated:
        opposite = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE,
                    ast.LtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
                    ast.IsNot: ast.Is}  # fmt: skip
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            test = ast.Compare(test.left, [opposite[type(test.ops[0])]()], test.comparators)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test = test.operand
        else:
            test = ast.UnaryOp(ast.Not(), test)
    return shortened(ast.unparse(test))


def shortened(text: str, width: int = 70) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def names_one_rank(test: ast.expr, *, negated: bool, guessed: bool) -> bool:
    """Whether a condition holds on a single rank by its form: `rank == 0`, `not rank`, `is_main_process`.

    `guessed`: a name alone says nothing.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        named = isinstance(test.operand, ast.Name) and not guessed
        return names_one_rank(test.operand, negated=not negated, guessed=guessed) or (named and not negated)
    if isinstance(test, ast.BoolOp):
        return not negated and isinstance(test.op, ast.And) and any(
            names_one_rank(value, negated=False, guessed=guessed) for value in test.values
        )  # fmt: skip
    if isinstance(test, ast.Compare):
        wanted = ast.NotEq if negated else ast.Eq
        return isinstance(test.ops[0], wanted) and any(
            isinstance(side, ast.Constant) for side in (test.left, *test.comparators)
        )
    return not negated and not guessed and isinstance(test, ast.Name | ast.Attribute | ast.Call)
