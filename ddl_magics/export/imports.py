"""Imports of all cells, drawn to the script's top: each once, in the order that isort and ruff give them.

An import stays where it is when moving it could change what it does: under a condition, beside another statement on
its line, after `os.environ` or `sys.path` was changed (Python's own library aside), and where its name is bound to
something else as well. One that only cells outside of the script read is left out.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddl_magics.export.reading import Part

STAYS = "# noqa: E402"
"""What a linter is told of an import that stays below other code."""
UNREAD = "noqa: F401"
"""What it is told of an import that no cell reads: it may be there for what it does."""
SETTLED = {"os.environ", "sys.path"}
"""What decides how modules are found and behave."""
SETTLES = {"os.putenv", "os.unsetenv", "site.addsitedir"}
READS = {"get", "copy", "items", "keys", "values", "index", "count"}
WIDTH = 88


@dataclass(frozen=True)
class Use:
    """Names that the cells of the script read, and those that other cells of the notebook do."""

    here: set[str]
    elsewhere: set[str]


@dataclass
class Imports:
    """What goes to the top."""

    modules: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(module, name it gets, or the module's own) -> comments that stood beside it."""
    names: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)
    """(module, name, name it gets) of `from module import name` -> comments."""

    def add(self, node: ast.Import | ast.ImportFrom, comments: Sequence[str] = (), use: Use | None = None) -> None:
        """Take in one statement, as far as it is read."""
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            unread = use is not None and name not in use.here and not _is_future(node)
            if use is not None and unread and name in use.elsewhere:
                continue
            if isinstance(node, ast.Import):
                known = self.modules.setdefault((alias.name, alias.asname or alias.name), [])
            else:
                module = "." * node.level + (node.module or "")
                known = self.names.setdefault((module, alias.name, alias.asname or alias.name), [])
            known += [text for text in [*comments, *([UNREAD] if unread else [])] if text not in known]

    def has(self, node: ast.Import | ast.ImportFrom) -> bool:
        """Whether all that a statement imports is there already."""
        if isinstance(node, ast.Import):
            return all((alias.name, alias.asname or alias.name) in self.modules for alias in node.names)
        module = "." * node.level + (node.module or "")
        return all((module, alias.name, alias.asname or alias.name) in self.names for alias in node.names)

    def text(self) -> str:
        """All of them, in sections: `__future__`, Python's own, everybody else's."""
        sections = ["\n".join([*self._plain(section), *self._from(section)]) for section in range(3)]
        return "\n\n".join(filter(None, sections))

    def _plain(self, section: int) -> Iterator[str]:
        of_section = [key for key in self.modules if _section(key[0]) == section]
        for module, name in sorted(of_section, key=lambda key: (key[0].lower(), key)):
            comment = _beside(self.modules[module, name])
            yield (f"import {module}" if name == module else f"import {module} as {name}") + comment

    def _from(self, section: int) -> Iterator[str]:
        modules = {module for module, _, _ in self.names if _section(module) == section}
        for module in sorted(modules, key=lambda name: (name.lower(), name)):
            members = sorted(
                ((name, given) for of, name, given in self.names if of == module), key=lambda pair: _order(pair[0])
            )
            comments = [text for name, given in members if name == given for text in self.names[module, name, given]]
            words = [name for name, given in members if name == given]
            if words:
                yield _from_line(module, words, _beside(list(dict.fromkeys(comments))))
            for name, given in members:
                if name != given:
                    yield f"from {module} import {name} as {given}" + _beside(self.names[module, name, given])


def _from_line(module: str, words: Sequence[str], comment: str) -> str:
    line = f"from {module} import {', '.join(words)}"
    if len(line) <= WIDTH:
        return line + comment
    inner = "".join(f"    {word},\n" for word in words)
    return f"from {module} import ({comment}\n{inner})"


def _beside(comments: Sequence[str]) -> str:
    return f"  # {'; '.join(comments)}" if comments else ""


def _section(module: str) -> int:
    head = module.partition(".")[0]
    return 0 if head == "__future__" else 1 if head in sys.stdlib_module_names else 2


def _order(name: str) -> tuple[int, str, str]:
    """Constants, classes, then the rest: what isort calls `order_by_type`."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, name.lower(), name


def draw(
    parts: Sequence[Part], others: Sequence[Part]
) -> tuple[Imports, dict[int, set[int]], dict[int, dict[int, str]]]:
    """Take the imports of all cells that can move.

    Parameters
    ----------
    parts
        The cells of the script.
    others
        The other code cells of the notebook.

    Returns
    -------
    The imports, and by the place of a cell: lines that are gone with them, and first lines of imports that stay with
    what a linter is told there.
    """
    imports = Imports()
    gone: dict[int, set[int]] = {}
    stays: dict[int, dict[int, str]] = {}
    meanings = _meanings(parts)
    use = Use(_read(parts), _read(others))
    settled = False
    for place, part in enumerate(parts):
        comments = _comments(part.lines)
        gone[place], stays[place] = set(), {}
        for node in part.tree.body:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                settled = settled or _settles(node)
                continue
            lines = lines_of(node)
            if any(problem.line <= node.lineno <= problem.last for problem in part.problems):
                continue
            moves = not settled or imports.has(node) or _of_python(node)
            if _is_future(node) or (moves and _alone(node, part) and _means_one(node, meanings)):
                imports.add(node, [comments[line] for line in sorted(lines & set(comments))], use)
                gone[place] |= lines
            else:
                names = {name for name, _ in _bound(node)}
                stays[place][node.lineno] = STAYS if names & use.here else f"{STAYS}, F401"
    return imports, gone, stays


def _is_future(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _of_python(node: ast.Import | ast.ImportFrom) -> bool:
    """Whether a statement imports from Python's own library, which no variable and no path changes."""
    modules = [node.module or "."] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return all(_section(module) < 2 for module in modules)


def _read(parts: Sequence[Part]) -> set[str]:
    return {node.id for part in parts for node in ast.walk(part.tree) if isinstance(node, ast.Name)}


def _meanings(parts: Sequence[Part]) -> Counter[str]:
    """How many different things each name of the notebook is bound to."""
    found: set[tuple[str, str]] = set()
    for place, part in enumerate(parts):
        for node in part.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= set(_bound(node))
        rebound = {name for node in part.tree.body if not isinstance(node, ast.Import | ast.ImportFrom)
                   for name in _stored(node)}  # fmt: skip
        found |= {(name, f"cell {place}") for name in rebound}
    return Counter(name for name, _ in found)


def _stored(node: ast.AST) -> Iterator[str]:
    """Names that a statement may bind, at any depth but in functions of their own."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.id
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (name for name, _ in _bound(node))
    for child in ast.iter_child_nodes(node):
        yield from _stored(child)


def _bound(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Names that an import binds, and to what."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}:{alias.name}"
        elif alias.asname:
            yield alias.asname, alias.name
        else:
            yield alias.name.partition(".")[0], alias.name.partition(".")[0]


def lines_of(node: ast.stmt) -> set[int]:
    """Every line of a statement."""
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _means_one(node: ast.Import | ast.ImportFrom, meanings: Counter[str]) -> bool:
    return all(meanings[name] == 1 and name != "*" for name, _ in _bound(node))


def _alone(node: ast.stmt, part: Part) -> bool:
    """Whether no other statement shares its lines."""
    others = (other for other in part.tree.body if other is not node)
    return not any(lines_of(node) & lines_of(other) for other in others)


def _settles(node: ast.AST) -> bool:
    """Whether a statement changes `os.environ`, `sys.path` or the like; reading them changes nothing."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
            of, name = ast.unparse(one.func.value), one.func.attr
            if (of in SETTLED and name not in READS) or f"{of}.{name}" in SETTLES:
                return True
        stored = isinstance(getattr(one, "ctx", None), ast.Store | ast.Del)
        whole = one.value if isinstance(one, ast.Subscript) else one
        if stored and isinstance(whole, ast.Attribute) and ast.unparse(whole) in SETTLED:
            return True
    return False


def _comments(lines: Iterable[str]) -> dict[int, str]:
    """Comments by line."""
    found: dict[int, str] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
            if token.type == tokenize.COMMENT:
                found[token.start[0]] = token.string.lstrip("#").strip()
    except (tokenize.TokenError, SyntaxError):  # of a magic further down: what stood above it was read
        return found
    return found
