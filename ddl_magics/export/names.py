"""Which names of the notebook a cell needs, sets and changes, told from its tree.

The tree is walked in the order of evaluation, so that a name counts as needed only where the cell has not set it
before; what functions read is needed once they are called. Limits: `exec`, `globals()` and star imports hide names,
and a name that one branch sets counts as set.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BUILTIN = frozenset(dir(builtins)) | {"__name__", "__doc__", "__file__", "get_ipython"}
HARMLESS = {"print", "display", "len", "type", "help", "repr", "str", "list", "sorted", "sum", "min", "max"}
"""Functions that do not change what they are given."""


@dataclass
class Names:
    """Names of one cell at its top level; lines are the cell's, from 1."""

    needs: dict[str, int] = field(default_factory=dict)
    """Read before the cell sets them: name -> first line."""
    needs_later: dict[str, int] = field(default_factory=dict)
    """Read by functions and classes' methods, when those are called, and not set by the cell."""
    sets: dict[str, int] = field(default_factory=dict)
    """Bound by assignment, import, `def` and the like: name -> first line."""
    changes: set[str] = field(default_factory=set)
    """Whose object it may change: `x.append(1)`, `x[0] = 1`, `shuffle(x)`."""
    star: bool = False
    """It imports with a star, so that anything may be set."""

    @property
    def all_needs(self) -> dict[str, int]:
        """Needed at once or later."""
        return {**self.needs_later, **self.needs}


def names_of(tree: ast.Module) -> Names:
    """Read a cell."""
    reader = _Reader()
    reader.visit(tree)
    names = reader.names
    names.needs_later = {name: line for name, line in names.needs_later.items() if name not in names.sets}
    names.changes = {name for statement in tree.body for name in _changed(statement)}
    return names


class _Reader(ast.NodeVisitor):
    """Walks one cell. `_local`: names of the comprehensions and class bodies that surround the present node."""

    def __init__(self) -> None:
        self.names = Names()
        self._local: list[set[str]] = []

    def _read(self, name: str, line: int) -> None:
        known = name in self.names.sets or name in BUILTIN or any(name in scope for scope in self._local)
        if not known:
            self.names.needs.setdefault(name, line)

    def _bind(self, name: str, line: int) -> None:
        if self._local:
            self._local[-1].add(name)
        else:
            self.names.sets.setdefault(name, line)

    def _in_order(self, *nodes: ast.AST | Iterable[ast.AST | None] | None) -> None:
        for node in nodes:
            if isinstance(node, ast.AST):
                self.visit(node)
            elif node is not None:
                self._in_order(*node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._bind(node.id, node.lineno)
        else:
            self._read(node.id, node.lineno)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._in_order(node.value, node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._in_order(node.annotation, node.value)
        if node.value is not None or not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id, node.lineno)
        self._in_order(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.names.sets.setdefault(node.target.id, node.lineno)  # also from within a comprehension

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._in_order(node.iter, node.target, node.body, node.orelse)

    visit_AsyncFor = visit_For  # noqa: N815 - as ast.NodeVisitor asks for it

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self.names.star |= alias.name == "*"
            self._bind(alias.asname or alias.name.partition(".")[0], node.lineno)

    visit_ImportFrom = visit_Import  # noqa: N815 - as ast.NodeVisitor asks for it

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._in_order(node.type)
        if node.name:
            self._bind(node.name, node.lineno)
        self._in_order(node.body)

    def generic_visit(self, node: ast.AST) -> None:
        bound = getattr(node, "name", None) if isinstance(node, ast.MatchAs | ast.MatchStar) else None
        bound = node.rest if isinstance(node, ast.MatchMapping) else bound
        super().generic_visit(node)
        if bound:
            self._bind(bound, getattr(node, "lineno", 0))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._in_order(node.decorator_list, node.args.defaults, node.args.kw_defaults)
        self._bind(node.name, node.lineno)
        self._later(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - as ast.NodeVisitor asks for it

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._in_order(node.args.defaults, node.args.kw_defaults)
        self._later(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._in_order(node.decorator_list, node.bases, [keyword.value for keyword in node.keywords])
        self._local.append(set())
        self._in_order(node.body)
        self._local.pop()
        self._bind(node.name, node.lineno)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self._local.append(set())
        for part in node.generators:
            self._in_order(part.iter, part.target, part.ifs)
        self._in_order([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        self._local.pop()

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp  # noqa: N815 - the same

    def _later(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """What a function's body reads and sets of the notebook, by Python's own scopes."""
        for table in _tables(symtable.symtable(ast.unparse(node), "<cell>", "exec")):
            for symbol in table.get_symbols():
                name = symbol.get_name()
                if table.get_type() != "module" and symbol.is_declared_global() and symbol.is_assigned():
                    self.names.sets.setdefault(name, node.lineno)
                elif table.get_type() != "module" and symbol.is_global() and symbol.is_referenced():
                    surrounding = any(name in scope for scope in self._local)
                    if name not in BUILTIN and not surrounding:
                        self.names.needs_later.setdefault(name, _line_of(node, name))


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _line_of(node: ast.AST, name: str) -> int:
    """The first line on which a node reads a name."""
    lines = [one.lineno for one in ast.walk(node) if isinstance(one, ast.Name) and one.id == name]
    return min(lines, default=getattr(node, "lineno", 1))


def _changed(statement: ast.stmt) -> Iterator[str]:
    """Names of objects that a statement may change."""
    for node in ast.walk(statement):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript) or isinstance(node, ast.AugAssign):
                yield from _root(target)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            if isinstance(call.func, ast.Attribute):
                yield from _root(call.func.value)
            if not (isinstance(call.func, ast.Name) and call.func.id in HARMLESS):
                yield from (arg.id for arg in call.args if isinstance(arg, ast.Name))


def _root(node: ast.expr) -> Iterator[str]:
    """`x` of `x.a[0].b`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id
