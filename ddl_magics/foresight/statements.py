"""Takes one rank through a cell's statements: which branch it takes, where it leaves, what it calls."""

from __future__ import annotations

import ast

from ddl_magics.foresight import names
from ddl_magics.foresight.calls import Calls
from ddl_magics.foresight.values import (
    ARITHMETIC,
    NOTHING,
    Class,
    Function,
    Group,
    Instance,
    Ref,
    Value,
    compute,
    in_words,
    plain,
)
from ddl_magics.foresight.walk import Guard

TURNS = 16
"""Rounds of a `while` on the rank that are followed."""

Left = str | None
"""How a block was left early: `return`, `break`, `continue`, `raise`, `exit`."""


def leaves(block: list[ast.stmt]) -> bool:
    """Whether a block ends by leaving what is around it."""
    if not block:
        return False
    last = block[-1]
    call = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and ast.unparse(last.value.func)
    return isinstance(last, ast.Return | ast.Break | ast.Continue | ast.Raise) or call in names.EXITS


class Statements(Calls):
    """One rank on its way through a cell."""

    def run(self, block: list[ast.stmt]) -> Left:
        """Go through a block; tells how it was left, if early."""
        for statement in block:
            method = getattr(self, f"_do_{type(statement).__name__.lower()}", None)
            if method:
                left: Left = method(statement)
                if left:
                    return left
            else:
                for child in ast.iter_child_nodes(statement):
                    if isinstance(child, ast.expr):
                        self.visit(child)
        return None

    def bind(self, target: ast.expr, value: Value) -> None:
        """Give a name, or an attribute of an object of the notebook, its value."""
        if isinstance(value.it, bool) and any(guard.guessed for guard in self.guards):
            value = Value(value.it, by_rank=True, guessed=True)
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.visit(target.value)
            if isinstance(owner.it, Instance):
                owner.it.attributes[target.attr] = value
        elif isinstance(target, ast.Starred):
            self.bind(target.value, NOTHING)
        elif isinstance(target, ast.Tuple | ast.List):
            for place, part in enumerate(target.elts):
                self.bind(part, self._part(value, place, len(target.elts)))

    @staticmethod
    def _part(value: Value, place: int, count: int) -> Value:
        if isinstance(value.it, tuple) and len(value.it) == count:
            return Value(value.it[place], value.by_rank)
        made = isinstance(value.it, Ref) and value.it.dotted == "deepspeed.initialize()" and place == 0
        return value if made else NOTHING

    # Definitions and imports.

    def _do_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Left:
        self.scopes[-1][node.name] = Value(self._function(node))
        return None

    _do_asyncfunctiondef = _do_functiondef

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
        for decorator in node.decorator_list:
            word = ast.unparse(decorator)
            if word.rpartition(".")[2] in names.ON_RANK_0:
                return Function(node, self.serial, on_rank_0=True, decorator=word)
        return Function(node, self.serial)

    def _do_classdef(self, node: ast.ClassDef) -> Left:
        methods = {part.name: self._function(part)
                   for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}  # fmt: skip
        self.scopes[-1][node.name] = Value(Class(node.name, methods))
        return None

    def _do_import(self, node: ast.Import) -> Left:
        for alias in node.names:
            whole = names.canonical(alias.name) if alias.asname else alias.name.partition(".")[0]
            self.scopes[-1][alias.asname or whole] = Value(Ref(whole))
        return None

    def _do_importfrom(self, node: ast.ImportFrom) -> Left:
        module = node.module or ""
        for alias in node.names:
            if alias.name == "*":
                every = names.TORCH if module.startswith("torch.distributed") else ()
                self.scopes[-1].update({name: Value(Ref(f"{module}.{name}")) for name in every})
            else:
                whole = names.canonical(f"{module}.{alias.name}".lstrip("."))
                self.scopes[-1][alias.asname or alias.name] = Value(Ref(whole))
        return None

    def _do_assign(self, node: ast.Assign) -> Left:
        target = node.targets[0]
        if (
            isinstance(target, ast.Tuple)
            and isinstance(node.value, ast.Tuple)
            and len(target.elts) == len(node.value.elts)
        ):
            for part, value in zip(target.elts, [self.visit(part) for part in node.value.elts], strict=True):
                self.bind(part, value)
            return None
        value = self.visit(node.value)
        for each in node.targets:
            self.bind(each, value)
        return None

    def _do_annassign(self, node: ast.AnnAssign) -> Left:
        if node.value:
            self.bind(node.target, self.visit(node.value))
        return None

    def _do_augassign(self, node: ast.AugAssign) -> Left:
        before, by = self.visit(node.target), self.visit(node.value)
        op = ARITHMETIC.get(type(node.op))
        self.bind(node.target, compute(op, before, by) if op else NOTHING)
        return None

    def _do_delete(self, node: ast.Delete) -> Left:
        for target in node.targets:
            self.bind(target, NOTHING)
        return None

    # Branches.

    def _do_if(self, node: ast.If) -> Left:
        found = self.visit(node.test)
        test = self.settle(found)
        if not plain(test.it):  # the same on every rank, whichever it is: both are read
            before_both = dict(self.scopes[-1])
            one = self.run(node.body)
            after_one = dict(self.scopes[-1])
            other = self.run(node.orelse)
            for name, value in self.scopes[-1].items():  # which group it is depends on the branch
                rivals = (states[name].it for states in (before_both, after_one) if name in states)
                if any(
                    rival != value.it for rival in rivals if isinstance(rival, Group) or isinstance(value.it, Group)
                ):
                    self.scopes[-1][name] = Value(Group())
            return one if one == other else None
        taken, missed = (node.body, node.orelse) if test.it else (node.orelse, node.body)
        surely_on_the_rank = found.by_rank and plain(found.it) and not found.guessed
        if taken and isinstance(taken[-1], ast.Raise) and not surely_on_the_rank:
            return None  # `if rank == 0 and not found: raise` is a check that is not expected to fail
        before = len(self.guards)
        if test.by_rank:
            self.guard(node.test, negated=not test.it, guessed=test.guessed)
        left = self.run(taken)
        del self.guards[before:]
        if not left and test.by_rank and leaves(missed):
            self.guard(
                node.test, negated=not test.it, guessed=test.guessed
            )  # what follows is for those who did not leave
        return left

    def _do_match(self, node: ast.Match) -> Left:
        subject = self.visit(node.subject)
        if not (subject.by_rank and plain(subject.it)):
            for case in node.cases:
                self.run(case.body)
            return None
        for case in node.cases:
            if self._fits(case.pattern, subject) and self.visit(case.guard or ast.Constant(value=True)).it:
                words = f"{in_words(node.subject)} is {ast.unparse(case.pattern)}"
                before = len(self.guards)
                one = isinstance(case.pattern, ast.MatchValue)
                self.guards.append(Guard(words, one, len(self.calls), test=id(node), guessed=subject.guessed))
                left = self.run(case.body)
                del self.guards[before:]
                return left
        return None

    def _fits(self, pattern: ast.pattern, subject: Value) -> bool:
        if isinstance(pattern, ast.MatchValue):
            return bool(self.visit(pattern.value).it == subject.it)
        if isinstance(pattern, ast.MatchSingleton):
            return pattern.value is subject.it
        if isinstance(pattern, ast.MatchOr):
            return any(self._fits(part, subject) for part in pattern.patterns)
        return isinstance(pattern, ast.MatchAs) and (pattern.pattern is None or self._fits(pattern.pattern, subject))

    # Loops.

    def _do_for(self, node: ast.For | ast.AsyncFor) -> Left:
        guards, marks = len(self.guards), len(self.marks)
        left: Left = None
        for value in self.rounds(node.iter):
            self.bind(node.target, value)
            left = self.run(node.body)
            if left and left != "continue":
                break
        else:
            self._forget_groups(node.body)
        del self.guards[guards:], self.marks[marks:]
        if left == "break":
            return None
        return left if left and left != "continue" else self.run(node.orelse)

    _do_asyncfor = _do_for

    def _forget_groups(self, body: list[ast.stmt]) -> None:
        """Which groups a loop has made, where it has not been followed to its end."""
        nodes = [node for statement in body for node in ast.walk(statement) if not self.to_the_end]
        stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for name in stored & set(self.scopes[-1]):
            if self.scopes[-1][name].it is None or isinstance(self.scopes[-1][name].it, Group):
                self.scopes[-1][name] = Value(Group())

    def _do_while(self, node: ast.While) -> Left:
        before = len(self.guards)
        for number in range(TURNS):
            test = self.settle(self.visit(node.test))
            if (plain(test.it) and not test.it) or (number == 2 and not test.by_rank):
                break
            if test.by_rank:
                words, depth = in_words(node.test), len(self.calls)
                self.guards.append(Guard(words, one=False, depth=depth, guessed=test.guessed))
            self.marks.append((number, None))
            left = self.run(node.body)
            self.marks.pop()
            del self.guards[before:]
            if left == "break":
                return None
            if left and left != "continue":
                return left
        return self.run(node.orelse)

    def _do_break(self, node: ast.Break) -> Left:
        return "break"

    def _do_continue(self, node: ast.Continue) -> Left:
        return "continue"

    # Ways out.

    def _do_return(self, node: ast.Return) -> Left:
        self.returned = self.visit(node.value)
        return "return"

    def _do_raise(self, node: ast.Raise) -> Left:
        self.visit(node.exc)
        return "raise"

    def _do_expr(self, node: ast.Expr) -> Left:
        self.visit(node.value)
        leaving = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in names.EXITS
        return "exit" if leaving else None

    def _do_try(self, node: ast.Try) -> Left:
        left = self.run(node.body)
        if left == "raise" and node.handlers:
            left = None
        elif not left:
            left = self.run(node.orelse)
        return self.run(node.finalbody) or left

    _do_trystar = _do_try

    def _do_with(self, node: ast.With | ast.AsyncWith) -> Left:
        turns = len(self.turns)
        for item in node.items:
            value = self.visit(item.context_expr)
            if item.optional_vars:
                self.bind(item.optional_vars, value)
            call = item.context_expr
            called = self.visit(call.func).it if isinstance(call, ast.Call) else None
            if isinstance(called, Ref) and called.dotted in names.IN_TURN:
                self.turns.append(ast.unparse(call))
        left = self.run(node.body)
        del self.turns[turns:]
        return left

    _do_asyncwith = _do_with
