"""Composes the script of a notebook, and writes it where nothing stands in the way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddl_magics.errors import UsageError
from ddl_magics.export import cells as of_cells
from ddl_magics.export import options, plain, reading, script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.export.reading import Part, Problem


def export(notebook: of_cells.Notebook, file: str, chosen: Sequence[int] | None, *, force: bool) -> str:
    """Write a script; returns what to tell the user.

    Parameters
    ----------
    notebook
        What ended well, in order.
    file
        Where to.
    chosen
        Numbers of cells, None for all `%%ddl` cells; plain cells that they need come along.
    force
        Replace a file that is there, and write lines that no script can have as comments.

    Raises
    ------
    UsageError
        The file is a notebook, or is there, or there are such lines: then nothing is written.
    """
    path = Path(file).expanduser()
    if path.suffix == ".ipynb" or (path.exists() and notebook.path is not None and path.samefile(notebook.path)):
        raise UsageError(
            f"{file} is a notebook, which a script would overwrite", "Name another file, such as train.py."
        )
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{file} cannot be written", "Name a file in a folder that is there.")
    if path.exists() and not force:
        raise UsageError(f"{file} is there already", "--force replaces it.")
    text, problems, parts = compose(notebook, path.name, chosen)
    if problems and not force:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UsageError(
            f"nothing was written, for what no script can have (leave cells out by --cells, or --force makes comments "
            f"of it):\n{lines}"
        )
    path.write_text(text, encoding="utf-8")
    told = [f"{file}: {', '.join(f'In[{part.cell.number}]' for part in parts)}"]
    if notebook.failed:
        told.append(
            f"left out, since they did not end well: {', '.join(f'In[{cell.number}]' for cell in notebook.failed)}"
        )
    told += [f"not in the script: {problem}" if problem.last else str(problem) for problem in problems]
    told.append(f"ddl-magics run {file} -n 2")
    return "\n".join(told)


def compose(
    notebook: of_cells.Notebook, file: str, chosen: Sequence[int] | None
) -> tuple[str, list[Problem], list[Part]]:
    """The text of the script, what is not in it or would not work, and the code cells that are."""
    code = [cell for cell in notebook.cells if cell.kind != "text"]
    wanted = of_cells.chosen(code, chosen)
    everything = [reading.read(cell) for cell in code]
    kept = {place for place, cell in enumerate(code) if any(cell is one for one in wanted)}
    made, unmade = plain.needed(everything, kept)
    places = sorted(kept | made)
    parts = [everything[place] for place in places]
    plan = options.plan(parts)
    problems = [problem for part in parts for problem in part.problems] + plan.problems + unmade
    failed = [reading.read(cell) for cell in notebook.failed]
    problems += _undefined(everything, places, failed, {(problem.number, problem.line) for problem in unmade})
    order = {code[place].number: index for index, place in enumerate(places)}
    problems = sorted(set(problems), key=lambda problem: (order.get(problem.number, -1), problem.line))
    shown = of_cells.with_text(notebook.cells, [part.cell for part in parts], all_text=chosen is None)
    others = [*(part for part in everything if part not in parts), *failed]
    return script.write(shown, parts, others, plan, problems, (notebook.name, file)), problems, parts


def _undefined(
    everything: Sequence[Part], places: Sequence[int], failed: Sequence[Part], known: set[tuple[int, int]]
) -> list[Problem]:
    """Names that the cells read and none of them makes."""
    problems: list[Problem] = []
    at_first = {"ddl", *script.CONTEXT}
    at_last = at_first.union(*(everything[place].names.sets for place in places))
    if any(everything[place].names.star for place in places):
        return problems
    for place in places:
        part = everything[place]
        names = part.names
        missing = {name: line for name, line in names.needs_later.items() if name not in at_last}
        missing |= {name: line for name, line in names.needs.items() if name not in at_first}
        at_first |= set(names.sets)
        for name, line in missing.items():
            if part.cell.kind == "plain" or name in reading.OF_IPYTHON or (part.cell.number, line) in known:
                continue
            why = f"nothing in the script makes {name!r}{_maker(name, part, everything, failed)}"
            problems.append(reading.Problem(part.cell.number, line, part.lines[line - 1].strip(), why))
    return problems


def _maker(name: str, reader: Part, everything: Sequence[Part], failed: Sequence[Part]) -> str:
    """Say which other cell would make a name."""
    for parts, words in ((everything, "In[{}] does"), (failed, "In[{}] did not end well")):
        found = next((part.cell.number for part in parts if part is not reader and name in part.names.sets), None)
        if found is not None:
            return f"; {words.format(found)}"
    return ""
