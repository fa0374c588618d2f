"""Works an expression out for one rank, in the order in which Python would, and notes the collectives that it calls."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from ddl_magics.foresight import names
from ddl_magics.foresight.values import (
    ARITHMETIC,
    NOTHING,
    UNKNOWN,
    Group,
    Instance,
    Method,
    Ref,
    Value,
    compare,
    compute,
    in_words,
    plain,
)
from ddl_magics.foresight.walk import Guard, OverBudgetError, Walk

if TYPE_CHECKING:
    from collections.abc import Iterator

ITERATIONS = 4
"""Rounds of a loop over known values that are followed; two where the values are not known."""

NO_RANK_OF_THESE = {"config", "cfg", "lora", "lora_config", "peft_config", "hparams"}
"""`config.rank` is that of an adapter's matrices."""


class Expressions(Walk):
    """Works out expressions."""

    def visit(self, node: ast.expr | None) -> Value:
        """Its value on this rank."""
        if node is None:
            return NOTHING
        self.budget -= 1
        if self.budget < 0:
            raise OverBudgetError
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method:
            result: Value = method(node)
            return result
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.visit(child)
        return NOTHING

    def _constant(self, node: ast.Constant) -> Value:
        return Value(node.value) if plain(node.value) else NOTHING

    def _name(self, node: ast.Name) -> Value:
        return self.look_up(node.id)

    def _lambda(self, node: ast.Lambda) -> Value:
        return NOTHING  # it runs later, if at all

    def _await(self, node: ast.Await) -> Value:
        return self.visit(node.value)

    def _namedexpr(self, node: ast.NamedExpr) -> Value:
        value = self.visit(node.value)
        self.scopes[-1][node.target.id] = value
        return value

    def _tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        parts = [self.visit(part) for part in node.elts]
        by_rank = any(part.by_rank for part in parts)
        known = all(plain(part.it) or isinstance(part.it, Group) for part in parts)
        return Value(tuple(part.it for part in parts) if known else UNKNOWN, by_rank)

    _list = _set = _tuple

    def _binop(self, node: ast.BinOp) -> Value:
        left, right = self.visit(node.left), self.visit(node.right)
        op = ARITHMETIC.get(type(node.op))
        return compute(op, left, right) if op else Value(UNKNOWN, left.by_rank or right.by_rank)

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        value = self.visit(node.operand)
        if not plain(value.it):
            return Value(UNKNOWN, value.by_rank)
        if isinstance(node.op, ast.Not):
            return Value(not value.it, value.by_rank, value.guessed)
        if isinstance(node.op, ast.USub) and isinstance(value.it, int | float):
            return Value(-value.it, value.by_rank)
        return Value(UNKNOWN, value.by_rank)

    def _compare(self, node: ast.Compare) -> Value:
        if isinstance(node.ops[0], ast.In) and isinstance(node.left, ast.Constant):
            known = names.RANK_VARIABLES | names.LOCAL_VARIABLES | {"WORLD_SIZE"}
            if self.visit(node.comparators[0]).it == Ref("os.environ") and node.left.value in known:
                return Value(True)
        values = [self.visit(part) for part in (node.left, *node.comparators)]
        return compare(node.ops, values, self.place.rank)

    def _boolop(self, node: ast.BoolOp) -> Value:
        """Operands one after the other, until one decides; what stands behind one on the rank is under it."""
        stop = isinstance(node.op, ast.Or)
        before = len(self.guards)
        by_rank, unknown, guessed = False, False, False
        result: Any = not stop
        for part in node.values:
            value = self.visit(part)
            by_rank, guessed = by_rank or value.by_rank, guessed or value.guessed
            if plain(value.it) and bool(value.it) == stop:
                result, unknown = value.it, False
                break
            if not plain(value.it):
                unknown = True
            if value.by_rank:
                self.guard(part, negated=stop, guessed=value.guessed)
        del self.guards[before:]
        return Value(UNKNOWN if unknown else result, by_rank, guessed)

    def _ifexp(self, node: ast.IfExp) -> Value:
        test = self.settle(self.visit(node.test))
        if not plain(test.it):
            self.visit(node.body)
            self.visit(node.orelse)
            return NOTHING
        before = len(self.guards)
        if test.by_rank:
            self.guard(node.test, negated=not test.it, guessed=test.guessed)
        value = self.visit(node.body if test.it else node.orelse)
        del self.guards[before:]
        return Value(value.it, value.by_rank or test.by_rank, value.guessed or test.guessed)

    def _attribute(self, node: ast.Attribute) -> Value:
        base = self.visit(node.value)
        if isinstance(base.it, Instance):
            if node.attr in base.it.attributes:
                return base.it.attributes[node.attr]
            if node.attr in base.it.kind.methods:
                return Value(Method(base.it.kind.methods[node.attr], base.it))
        if node.attr in names.MAIN_ATTRIBUTES:
            return Value(self.place.rank == 0, by_rank=True)
        if node.attr in names.RANK_ATTRIBUTES and not (
            isinstance(node.value, ast.Name) and node.value.id in NO_RANK_OF_THESE
        ):
            return self.rank_of("local" in node.attr)
        if node.attr == "world_size":
            return Value(self.place.world_size)
        return Value(Ref(names.canonical(f"{base.it.dotted}.{node.attr}"))) if isinstance(base.it, Ref) else NOTHING

    def _subscript(self, node: ast.Subscript) -> Value:
        base, index = self.visit(node.value), self.visit(node.slice)
        if base.it == Ref("os.environ"):
            return self._variable(index.it, NOTHING)
        if (
            isinstance(base.it, tuple | range)
            and isinstance(index.it, int)
            and -len(base.it) <= index.it < len(base.it)
        ):
            return Value(base.it[index.it], base.by_rank or index.by_rank)
        some = base.it if isinstance(base.it, tuple) else (base.it,)
        return Value(Group()) if any(isinstance(it, Group) for it in some) else NOTHING  # one of several

    def _variable(self, name: Any, otherwise: Value) -> Value:
        """A variable of the environment of this rank: a string."""
        if name in names.RANK_VARIABLES or name in names.LOCAL_VARIABLES:
            return Value(str(self.rank_of(name in names.LOCAL_VARIABLES).it), by_rank=True)
        return Value(str(self.place.world_size)) if name == "WORLD_SIZE" else otherwise

    def _listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        self.scopes.append({})
        before = len(self.guards)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        found = self._comprehend(node.generators, parts)
        del self.guards[before:]
        self.scopes.pop()
        if not found or not all(isinstance(it, Group) for it in found):
            return NOTHING
        whole = isinstance(node, ast.ListComp) and len(node.generators) == 1 and self.to_the_end
        return Value(tuple(found) if whole else Group())

    _setcomp = _generatorexp = _dictcomp = _listcomp

    def _comprehend(self, generators: list[ast.comprehension], parts: list[ast.expr]) -> list[Any]:
        """What the parts are in the rounds that are followed."""
        if not generators:
            return [self.visit(part).it for part in parts]
        found_parts = []
        first, *rest = generators
        for value in self.rounds(first.iter):
            self.bind(first.target, value)
            before = len(self.guards)
            passes = True
            for test in first.ifs:
                found = self.settle(self.visit(test))
                if plain(found.it) and not found.it:
                    passes = False
                    break
                if found.by_rank:
                    self.guard(test, negated=False, guessed=found.guessed)
            if passes:
                found_parts += self._comprehend(rest, parts)
            del self.guards[before:]
        return found_parts

    def rounds(self, over: ast.expr) -> Iterator[Value]:
        """What a loop over something goes through, a few rounds of it, with their marks and their guard set."""
        value = self.visit(over)
        known = isinstance(value.it, range | tuple | list)
        values = [Value(it, value.by_rank) for it in value.it[:ITERATIONS]] if known else [NOTHING] * 2
        length = len(value.it) if known and value.by_rank else None
        guards, marks = len(self.guards), len(self.marks)
        for number, each in enumerate(values):
            if length is not None:
                self.guards.append(Guard(in_words(over), one=False, depth=len(self.calls), loop=True,
                                         guessed=value.guessed))  # fmt: skip
            self.marks.append((number, length))
            yield each
            del self.guards[guards:], self.marks[marks:]
        self.to_the_end = known and len(value.it) == len(values)
