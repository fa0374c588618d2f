"""What this rank tells about the names in its namespace: completions, help, and where `name?` in a cell is shown.

Asked between cells, in the main thread: looking into a user's objects beside running code would not be safe. Static
analysis (jedi) is off, since its first look into torch takes seconds; live objects tell more anyway. Names that the
cell itself binds, which do not exist yet, come from its syntax tree.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

import torch
from IPython.core.completer import provisionalcompleter
from IPython.utils.tokenutil import token_at_cursor

from ddl_magics.rank.engine import this_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddl_magics.rank.engine import RankKernel

MOST = 500
"""Completions that are sent."""

WORD = re.compile(r"(?<![\w.\"'%!])[^\W\d]\w*$")
"""The beginning of a plain name before the cursor."""

STEP = re.compile(r"^[^\W\d]\w*|\.[^\W\d]\w*|\[-?\d+\]")
PATH = re.compile(r"(?<![\w.\])])([^\W\d]\w*(?:\.[^\W\d]\w*|\[-?\d+\])*)\.(\w*)$")
"""A name, attributes and numbers of its parts, and the attribute that has begun before the cursor."""

Completion = tuple[int, int, str, str, str]
"""Start and end of what is replaced, the text, its type, its signature."""


def complete(code: str, cursor: int) -> list[Completion]:
    """Completions in a cell at `cursor`, below the line of the magic."""
    body = _without_magic(code)
    shell = this_kernel().shell
    shell.Completer.use_jedi = False
    with provisionalcompleter():
        found = [_plain(body, completion) for completion in shell.Completer.completions(body, cursor)]
    if not found:
        found = list(_of_a_module(body, cursor))
    found = [one for one in found if not one[2].startswith("%") or body[one[0] : cursor].startswith("%")]
    known = {text for _, _, text, _, _ in found}
    return [*(one for one in _of_the_cell(body, cursor) if one[2] not in known), *found[:MOST]]


def _without_magic(code: str) -> str:
    """The cell with the magic's line as a comment of the same length."""
    return code.replace("%%", "#%", 1)


def _plain(code: str, completion: Any) -> Completion:
    """Without the dot that both the cell and IPython's text begin with."""
    start, text = completion.start, completion.text
    if text.startswith(".") and code[start : start + 1] == ".":
        start, text = start + 1, text[1:]
    kind = "" if completion.type == "<unknown>" else completion.type or ""
    return start, completion.end, text, kind, completion.signature or ""


def _of_a_module(code: str, cursor: int) -> Iterator[Completion]:
    """Attributes of a part of a model, `model.layers[0].`, into which IPython dares not look.

    It takes `__getattr__` for user's code with side effects; that of `torch.nn.Module` has none.
    """
    path = PATH.search(code, 0, cursor)
    if path is None:
        return
    first, *steps = STEP.findall(path[1])
    thing = this_kernel().shell.user_ns.get(first)
    for step in steps:
        if not isinstance(thing, torch.nn.Module):
            return
        try:
            thing = thing[int(step[1:-1])] if step[0] == "[" else getattr(thing, step[1:])  # type: ignore[index]
        except (AttributeError, IndexError, KeyError, TypeError):
            return
    if isinstance(thing, torch.nn.Module | torch.Tensor):
        for name in dir(thing):
            if name.startswith(path[2]) and (path[2].startswith("_") or not name.startswith("_")):
                yield path.start(2), cursor, name, "", ""


def _of_the_cell(code: str, cursor: int) -> Iterator[Completion]:
    """Names that the cell binds above the cursor's line."""
    word = WORD.search(code, 0, cursor)
    if word is None:
        return
    for name in sorted(bound_names(code, cursor)):
        if name.startswith(word.group()):
            yield word.start(), cursor, name, "statement", ""


def bound_names(code: str, cursor: int) -> set[str]:
    """Names that code binds above the cursor's line, as far as it is Python there."""
    above, _, line = code[:cursor].rpartition("\n")
    indentation = line[: len(line) - len(line.lstrip())]
    try:
        tree = ast.parse(this_kernel().shell.transform_cell(f"{above}\n{indentation}pass\n"))
    except (SyntaxError, ValueError):
        return set()
    return {name for node in ast.walk(tree) for name in _binds(node)}


def _binds(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.alias) and node.name != "*":
        yield node.asname or node.name.partition(".")[0]


def inspect(code: str, cursor: int, detail: int) -> dict[str, Any] | None:
    """Help on the name at the cursor, by MIME type; None where there is no such name."""
    try:
        name = token_at_cursor(_without_magic(code), cursor)
        return dict(this_kernel().shell.object_inspect_mime(name, detail_level=detail))
    except KeyError:
        return None


def page_in_output(kernel: RankKernel) -> None:
    """Show what goes to a pager (`name?`, `%psource`) in the cell's output, of the lowest rank of the cell alone.

    A pager's text travels in the reply to the execute request, where no front end would see it.
    """

    def page(_: Any, data: Any, **_options: Any) -> None:
        ranks = kernel.cell_parent.get("metadata", {}).get("ddl", {}).get("ranks") or [0]
        if kernel.runner.context.world.rank == min(ranks):
            kernel.shell.display_pub.publish(data if isinstance(data, dict) else {"text/plain": data})

    kernel.shell.set_hook("show_in_pager", page, 0)
