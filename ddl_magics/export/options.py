"""What the line of each `%%ddl` cell becomes: arguments of `ddl_magics.init`, and of `ddl.begin` where a cell begins.

The script has one strategy, its option `--strategy`, as long as the cells agree; a cell that compared several takes
that one. Cells that name different ones keep them, by `ddl.begin`. Precision and the like act through the context
alone, so that the first cell that uses it gives them to `init`; a seed acts at once, and stays where its cell begins.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddl_magics.export.reading import Part, Problem
from ddl_magics.strategies import spec as specs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.parsing import CellOptions

DECIDES = {"model_init", "prepare", "strategy", "generate", "load", "from_pretrained"}
"""Parts of the context that ask for the strategy of the cell."""
NEUTRAL = {
    "all_gather", "all_reduce_mean", "barrier", "device", "first", "local_rank", "local_world_size", "node_rank",
    "note", "print", "rank", "unwrap", "world_size",
}  # fmt: skip
"""Parts of it that are the same in every cell, whatever its line says."""
DEFAULTS: dict[str, object] = {"precision": "32", "checkpoint_activations": False, "steps": None}
"""Options that act through the context, as the cell's line and `init` have them by themselves."""


@dataclass(frozen=True)
class Plan:
    """How the script begins, and how each of its cells."""

    default: str
    """Of the script's option `--strategy`."""
    init: str
    """Further arguments of `ddl_magics.init`, as text."""
    begins: dict[int, str]
    """By the place of a cell: the arguments of `ddl.begin`; cells that need none are not there."""
    problems: list[Problem]


def plan(parts: Sequence[Part]) -> Plan:
    """Arrange the options of all cells, in order."""
    uses = _use_context(parts)
    ranks = [place for place, part in enumerate(parts) if part.cell.kind == "ranks"]
    fixed = {place: text for place in ranks if (text := _fixed(parts[place], uses=place in uses))}
    default, switching = _default(parts, ranks, list(fixed.values()))
    first = next((place for place in ranks if place in uses), ranks[0])
    base = _by_context(parts[first].options)
    of_first = parts[0].options.seed if ranks[0] == 0 else None
    # What a plain cell draws was the same for all ranks; so are ranks that begin with the same seed.
    seed = 0 if of_first is None and len(ranks) < len(parts) else of_first
    begins: dict[int, str] = {}
    for place in ranks:
        options = parts[place].options
        given: dict[str, object] = {}
        if place in uses:
            wanted = fixed.get(place, default)
            given |= {} if wanted == default else {"strategy": wanted}
            given |= {name: value for name, value in _by_context(options).items() if value != base[name]}
        if options.seed is not None and place > 0:
            given["seed"] = options.seed
        if given or (place in uses and (place != first or (place > 0 and seed))):
            begins[place] = ", ".join(f"{name}={literal(value)}" for name, value in given.items())
    init = {name: value for name, value in base.items() if value != DEFAULTS[name]}
    init |= {} if seed is None else {"seed": seed}
    text = "".join(f", {name}={literal(value)}" for name, value in init.items())
    return Plan(default, text, begins, _alone_among_others(parts, fixed) if switching else [])


def literal(value: object) -> str:
    """A value as it is written in a program, strings in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _by_context(options: CellOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in DEFAULTS}


def _use_context(parts: Sequence[Part]) -> set[int]:
    """Places of the `%%ddl` cells that use `ddl`, also by a function of an earlier cell."""
    users = {"ddl"}
    found: set[int] = set()
    for place, part in enumerate(parts):
        for node in part.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and users & _read_in(node):
                users.add(node.name)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda) and users & _read_in(node.value):
                users |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if users & _read_in(part.tree):
            found.add(place)
    return {place for place in found if parts[place].cell.kind == "ranks"}


def _read_in(node: ast.AST) -> set[str]:
    """Names in a piece of code; `ddl` only where it is used for something that depends on the cell."""
    neutral = {id(one.value) for one in ast.walk(node) if isinstance(one, ast.Attribute) and one.attr in NEUTRAL}
    names = (one for one in ast.walk(node) if isinstance(one, ast.Name))
    return {one.id for one in names if one.id != "ddl" or id(one) not in neutral}


def _fixed(part: Part, *, uses: bool) -> str:
    """The one strategy that a cell is meant for; empty where it takes any."""
    named = part.options.strategies
    if len(named) == 1:
        return named[0].text
    asks = any(
        isinstance(node, ast.Attribute) and node.attr in DECIDES and ast.unparse(node.value) == "ddl"
        for node in ast.walk(part.tree)
    )
    return part.cell.default if uses and asks and not named else ""


def _default(parts: Sequence[Part], ranks: Sequence[int], fixed: Sequence[str]) -> tuple[str, bool]:
    """The script's strategy, and whether some cell needs another."""
    if fixed:
        return fixed[0], len(set(fixed)) > 1
    compared = [part.options.strategies for part in (parts[place] for place in ranks)]
    texts = [spec.text for named in compared for spec in named]
    of_session = parts[ranks[0]].cell.default
    if not texts or of_session in texts:
        return of_session, False
    return next((text for text in texts if specs.parse(text).name != "single"), texts[0]), False


def _alone_among_others(parts: Sequence[Part], fixed: dict[int, str]) -> list[Problem]:
    """Cells of one process, in a script whose other cells are for all ranks."""
    return [
        Problem(
            parts[place].cell.number,
            1,
            parts[place].lines[0],
            "it is for one process, and other cells for all ranks: export it by itself, with --cells",
            len(parts[place].lines),
        )
        for place, text in fixed.items()
        if specs.parse(text).name == "single"
    ]
