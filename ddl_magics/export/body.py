"""The text of one cell as it stands in a script: its own lines and comments, with as few changes as can be."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddl_magics.export.imports import lines_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.export.reading import Part, Problem

GIVES_NONE = {
    "all_reduce", "append", "backward", "barrier", "begin", "broadcast", "clear", "close", "collect", "copy_",
    "destroy_process_group", "dump", "empty_cache", "extend", "init_process_group", "insert", "log", "makedirs",
    "mkdir", "note", "plot", "print", "reduce", "remove", "reverse", "save", "save_pretrained", "savefig", "send",
    "set_num_threads", "set_seed", "show", "shuffle", "sleep", "sort", "synchronize", "update", "write_text",
    "zero_grad",
}  # fmt: skip
"""Functions and methods that give back nothing worth a line, by their last name."""


class Body:
    """Lines of a cell under change; numbers are those of the cell as the user sees it."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._lines: list[bytes | None] = [line.encode() for line in part.lines]
        self._inserts: list[tuple[int, int, str]] = []
        self._staying: dict[int, str] = {}
        if part.cell.kind == "ranks":
            self._lines[0] = None

    def text(self) -> str:
        """The lines that are left, without blank ones at either end or where lines were taken out."""
        for number, column, words in sorted(self._inserts, reverse=True):
            before = self._lines[number - 1] or b""
            self._lines[number - 1] = before[:column] + words.encode() + before[column:]
        for number, told in self._staying.items():
            self._lines[number - 1] = (self._lines[number - 1] or b"") + f"  {told}".encode()
        kept: list[str] = []
        taken = True
        for line in self._lines:
            if line is None:
                taken = True
            elif line.strip() or not (taken and (not kept or not kept[-1].strip())):
                kept.append(line.decode())
                taken = False
        return "\n".join(kept).rstrip()

    def take(self, lines: set[int]) -> None:
        """Take lines out."""
        for line in lines:
            self._lines[line - 1] = None

    def stay(self, told: dict[int, str]) -> None:
        """Say to linters that the imports on these lines belong where they are."""
        self._staying = {max(lines_of(node)): told[node.lineno] for node in self._part.tree.body if node.lineno in told}

    def comment_out(self, problem: Problem) -> None:
        """Keep lines that no script can have as comments; a block that has nothing else passes."""
        first = (self._lines[problem.line - 1] or b"").decode()
        indent = first[: len(first) - len(first.lstrip())]
        for line in range(problem.line, problem.last + 1):
            bare = (self._lines[line - 1] or b"").decode().removeprefix(indent)
            begin = "pass  # " if indent and line == problem.line else "# "
            self._lines[line - 1] = f"{indent}{begin}{bare}".rstrip().encode()
        self._inserts = [insert for insert in self._inserts if not problem.line <= insert[0] <= problem.last]
        self._staying = {line: told for line, told in self._staying.items() if not problem.line <= line <= problem.last}

    def print_last(self, nothing: set[str]) -> None:
        """Print on rank 0 what the notebook showed: the value of the last expression.

        `nothing`: functions of the notebook that give back none.
        """
        last = self._part.last
        if not isinstance(last, ast.Expr) or last in self._part.left_out or _is_none(last.value, nothing):
            return
        first_line, last_line = last.lineno, last.end_lineno or last.lineno
        rest = self._part.lines[last_line - 1].encode()[last.end_col_offset or 0 :]
        if rest.lstrip().startswith(b";"):
            return
        extra = self._is_bare_tuple(last)
        self._inserts.append((first_line, last.col_offset, "ddl.print(" + "(" * extra))
        self._inserts.append((last_line, last.end_col_offset or 0, ")" * extra + ")"))

    def print_once(self) -> None:
        """What a cell of the kernel prints was printed once: rank 0 prints it."""
        for node in ast.walk(self._part.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                self._inserts.append((node.func.lineno, node.func.col_offset, "ddl."))

    def _is_bare_tuple(self, node: ast.Expr) -> bool:
        """Whether an expression is a tuple without brackets of its own."""
        if not isinstance(node.value, ast.Tuple):
            return False
        text = ast.get_source_segment("\n".join(self._part.lines), node) or ""
        try:
            inner = ast.parse(text[1:-1].strip(), mode="eval") if text.startswith("(") else None
        except SyntaxError:
            return True
        return not (inner and isinstance(inner.body, ast.Tuple)) and bool(node.value.elts)


def _is_none(value: ast.expr, nothing: set[str]) -> bool:
    """Whether an expression plainly gives None, or is a text that says something."""
    if isinstance(value, ast.Constant):
        return value.value is None or isinstance(value.value, str)
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    return name in GIVES_NONE or (isinstance(value.func, ast.Name) and name in nothing)


def give_nothing(parts: Sequence[Part]) -> set[str]:
    """Functions of the cells that have no value to return."""
    found: set[str] = set()
    for part in parts:
        for node in part.tree.body:
            if isinstance(node, ast.FunctionDef):
                gives = any(
                    (isinstance(one, ast.Return) and one.value is not None)
                    or isinstance(one, ast.Yield | ast.YieldFrom)
                    for one in ast.walk(node)
                )
                found = found | {node.name} if not gives else found - {node.name}
    return found


def removed(part: Part) -> set[int]:
    """Lines of a plain cell that looked after the ranks."""
    return {line for node in part.left_out for line in range(part.extent(node)[0], part.extent(node)[1] + 1)} - {
        line for node in part.tree.body for line in lines_of(node)
    }
