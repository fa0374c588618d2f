"""Reads one cell for a script: its statements, what of it no script can have, and the names it needs."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddl_magics.errors import UsageError
from ddl_magics.export.magics import is_left_out, of_ddl, tree_of
from ddl_magics.export.names import Names, names_of
from ddl_magics.foresight import CONTINUED
from ddl_magics.parsing import CellOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddl_magics.export.cells import Cell

NOTEBOOK_ONLY = {"IPython", "ipywidgets", "ipykernel", "ipyparallel"}
"""Packages that show or send things in a notebook."""
OF_IPYTHON = {"display", "In", "Out", "_", "__", "___"}
"""Names that only IPython puts there."""
FROM_RANKS = "comes from the ranks, and a script has no notebook to go through"
WAITS = "await outside a function is IPython's"


@dataclass(frozen=True)
class Problem:
    """A line that no script can have."""

    number: int
    line: int
    """Of the cell as the user sees it, from 1."""
    text: str
    why: str
    last: int = 0
    """The last line that goes with it; 0: nothing is taken out, the script just would not run."""

    def __str__(self) -> str:
        shown = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"In[{self.number}] line {self.line}: {shown} ({self.why})" if shown else (
            f"In[{self.number}] line {self.line}: {self.why}")  # fmt: skip


@dataclass
class Part:
    """One cell as it becomes part of a script."""

    cell: Cell
    lines: list[str]
    """As the user sees them; line 1 is the first."""
    tree: ast.Module
    options: CellOptions = field(default_factory=lambda: CellOptions(()))
    """Of a `%%ddl` cell; none where its line cannot be read."""
    names: Names = field(default_factory=Names)
    problems: list[Problem] = field(default_factory=list)
    left_out: list[ast.stmt] = field(default_factory=list)
    """Lines that look after ranks: nothing of a script."""
    last: ast.stmt | None = None
    """The last statement, whose value the notebook shows where it has one."""

    def extent(self, node: ast.stmt) -> tuple[int, int]:
        """First and last line of a statement, also of a magic that goes on after a backslash."""
        last = node.end_lineno or node.lineno
        while last < len(self.lines) and last == node.lineno and CONTINUED.match(self.lines[last - 1]):
            last += 1
            if not self.lines[last - 1].endswith("\\"):
                break
        return node.lineno, last


def read(cell: Cell) -> Part:
    """Take one code cell apart."""
    lines = cell.source.rstrip().split("\n")
    part = Part(cell, lines, ast.Module([], []))
    try:
        part.options = cell.options
    except UsageError as error:
        part.problems.append(Problem(cell.number, 1, lines[0], str(error), len(lines)))
        return part
    whole = _no_python(cell, lines)
    tree = None if whole else tree_of(cell.source)
    if tree is None:
        first, why = whole or (1, "it is no Python")
        part.problems.append(Problem(cell.number, first, lines[first - 1], why, len(lines)))
        return part
    part.tree = tree
    part.last = tree.body[-1] if tree.body else None
    part.left_out = [node for node in tree.body if cell.kind == "plain" and is_left_out(node)]
    for node in part.left_out:
        tree.body.remove(node)
    part.names = names_of(tree)
    part.problems += _of_options(part)
    if not part.problems:
        part.problems += sorted(_of_statements(part), key=lambda problem: problem.line)
    return part


def _no_python(cell: Cell, lines: list[str]) -> tuple[int, str] | None:
    """The line that makes the whole cell something else, and why."""
    begin = 1 if cell.kind == "ranks" else 0
    for number, line in enumerate(lines[begin:], begin + 1):
        if line.strip() and not line.lstrip().startswith("#"):
            magic = line.startswith("%%") and not line.startswith("%%ddl")
            return (number, "a magic, and what stands below it") if magic else None
    return None


def _of_options(part: Part) -> Iterator[Problem]:
    """Options of a `%%ddl` cell that mean the whole cell is not for every rank."""
    if part.options.ranks is not None:
        why = "all ranks run a script: write `if rank == 0:` into the cell"
        yield Problem(part.cell.number, 1, part.lines[0], why, len(part.lines))


def _of_statements(part: Part) -> Iterator[Problem]:
    taken = 0
    for statement, why in _unfit(part):
        first, last = part.extent(statement)
        if first > taken:
            text = part.lines[first - 1].strip()
            yield Problem(part.cell.number, first, text, why, last)
            taken = last


def _unfit(part: Part) -> Iterator[tuple[ast.stmt, str]]:
    """Statements that no script can have, the smallest that holds what is wrong, in order."""
    for statement, inside in _statements(part.tree):
        own = list(_own(statement))
        waits = not inside and any(
            isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) or getattr(node, "is_async", 0) for node in own
        )
        from_outside = part.names.needs_later if inside else part.names.needs
        why = WAITS if waits else next((why for node in own if (why := _why(node, set(from_outside)))), None)
        pulls = (of_ddl(statement) or ("",))[0] == "pull"
        why = f"it {FROM_RANKS}" if pulls else why
        if why:
            yield statement, why


def _statements(node: ast.AST, *, inside: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, and whether it is a function's."""
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, inside
        yield from _statements(child, inside=inside)


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """Nodes of a statement, without those of statements within it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _why(node: ast.AST, names: set[str]) -> str | None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        heads = sorted({name.partition(".")[0] for name in found} & NOTEBOOK_ONLY)
        return f"{heads[0]} needs a notebook" if heads else None
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "get_ipython()":
        return "the shell" if node.attr in ("system", "getoutput") else "a magic"
    if isinstance(node, ast.Name) and node.id in OF_IPYTHON and node.id in names:
        return "rich display needs a notebook: print it" if node.id == "display" else "only IPython knows this name"
    return None
