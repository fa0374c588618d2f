"""Lines of a cell that are no Python: magics, shell, help; and which of them a script can do without."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddl_magics.foresight import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

WITHOUT = {"load_ext", "reload_ext"}
"""Line magics that only bring in other magics."""


def tree_of(source: str) -> ast.Module | None:
    """The tree of a cell as the user sees it, line numbers too, magics as calls of `get_ipython()`; None: no Python.

    The line of a cell magic counts, and is empty.
    """
    if source.lstrip("\n").startswith("%%ddl"):
        return parse(source)
    tree = parse(f"#\n{source}")
    return None if tree is None else ast.increment_lineno(tree, -1)


def line_magic(node: ast.AST) -> tuple[str, str] | None:
    """Name and rest of a line magic, where a statement is one and nothing else."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return None
    call = node.value
    if ast.unparse(call.func) != "get_ipython().run_line_magic":
        return None
    words = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return (words[0], words[1]) if len(words) == 2 else None


def of_ddl(node: ast.AST) -> tuple[str, str] | None:
    """Verb of `%ddl` and what follows it, where a statement is that."""
    magic = line_magic(node)
    if magic is None or magic[0] != "ddl":
        return None
    verb, _, rest = magic[1].strip().partition(" ")
    return verb or "help", rest


def ddl_lines(source: str) -> Iterator[tuple[str, str]]:
    """The `%ddl` lines of a plain cell, in order: verb, rest."""
    tree = tree_of(source)
    for node in ast.walk(tree) if tree else ():
        found = of_ddl(node)
        if found is not None:
            yield found


def is_left_out(node: ast.AST) -> bool:
    """Whether a statement of a plain cell looks after ranks or loads magics: a script has neither to do."""
    found = of_ddl(node)
    magic = line_magic(node)
    return (found is not None and found[0] != "pull") or (magic is not None and magic[0] in WITHOUT)
