"""Which cells of the kernel a script needs: those that made what `%ddl push` copied to the ranks.

In the script every rank runs them. A name is followed back from the cell that reads it, through the cells that bound
or changed it, to whatever those needed. Limits: whole cells only; what a cell changes behind a function's back is
not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddl_magics.export.magics import ddl_lines
from ddl_magics.export.reading import FROM_RANKS, Part, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence


def needed(parts: Sequence[Part], kept: set[int]) -> tuple[set[int], list[Problem]]:
    """Places of plain cells that make what the kept `%%ddl` cells were given, and names that no cell made.

    Parameters
    ----------
    parts
        All code cells, in order.
    kept
        Places of those that are exported in any case.
    """
    wanted: list[tuple[str, int, int, int]] = []
    """Name, place up to which it was made, place of the cell that reads it, line there."""
    for place in sorted(kept):
        part = parts[place]
        if part.cell.kind == "plain":
            wanted += [(name, place - 1, place, line) for name, line in part.names.all_needs.items()]
            continue
        for name, line in part.names.all_needs.items():
            pushed = _last_push(parts, name, place)
            made_here = any(name in parts[other].names.sets for other in kept if pushed <= other < place)
            if pushed >= 0 and not made_here:
                wanted.append((name, pushed, place, line))
    return _made_by(parts, wanted)


def _made_by(parts: Sequence[Part], wanted: list[tuple[str, int, int, int]]) -> tuple[set[int], list[Problem]]:
    found: set[int] = set()
    problems: list[Problem] = []
    seen: set[tuple[str, int]] = set()
    while wanted:
        name, upto, reader, line = wanted.pop(0)
        if (name, upto) in seen:
            continue
        seen.add((name, upto))
        makers = _makers(parts, name, upto)
        if not makers:
            why = f"no cell that ended well makes {name!r}, which it was given by the notebook"
            text = parts[reader].lines[line - 1].strip()
            problems.append(Problem(parts[reader].cell.number, line, text, why))
        for place in makers:
            problem = _from_ranks(parts[place], name)
            if problem is not None:
                problems.append(problem)
                continue
            found.add(place)
            wanted += [(need, place - 1, place, at) for need, at in parts[place].names.all_needs.items()
                       if need not in _pulled(parts[place]) and (need != name or place != makers[-1])]  # fmt: skip
    return found, problems


def _makers(parts: Sequence[Part], name: str, upto: int) -> list[int]:
    """Places of the plain cells that changed a name's object, and last that of the one that bound it."""
    found: list[int] = []
    for place in range(upto, -1, -1):
        part = parts[place]
        if part.cell.kind == "ranks":
            if part.options.keep_as == name:
                return [*found, place]
            continue
        afresh = name in part.names.sets and name not in part.names.needs
        if afresh or name in _pulled(part) or name in part.names.changes or name in part.names.sets:
            found.append(place)
        if afresh or name in _pulled(part):
            return found
    return []


def _from_ranks(part: Part, name: str) -> Problem | None:
    """What a cell of the ranks gave to the notebook cannot be had in a script; a `%ddl pull` says so by itself."""
    if part.cell.kind != "ranks":
        return None
    return Problem(part.cell.number, 1, part.lines[0], f"{name!r} {FROM_RANKS}")


def _pulled(part: Part) -> set[str]:
    """Names that a plain cell got from the ranks."""
    rests = [rest for verb, rest in ddl_lines(part.cell.source) if verb == "pull"]
    return {word for rest in rests for word in rest.split() if word.isidentifier()}


def _last_push(parts: Sequence[Part], name: str, before: int) -> int:
    """Place of the last cell before this one that pushed a name; -1 where none did."""
    for place in range(before - 1, -1, -1):
        part = parts[place]
        if part.cell.kind == "plain" and any(
            verb == "push" and name in rest.split() for verb, rest in ddl_lines(part.cell.source)
        ):
            return place
    return -1
