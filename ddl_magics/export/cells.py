"""The cells of a notebook in their order, as the kernel ran them or as a file holds them.

A kernel knows its code cells and whether they ended well, but no text between them; that, and the order after cells
were moved or run again, is in the notebook's file. Limits: notebook format 4; a file that was never run tells
nothing of failures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ddl_magics import parsing
from ddl_magics.errors import UsageError
from ddl_magics.export.magics import ddl_lines
from ddl_magics.strategies import spec as specs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """One cell that ended well, or text."""

    kind: Literal["ranks", "plain", "text"]
    """A `%%ddl` cell, a cell of the kernel, or markdown."""
    source: str
    number: int = 0
    """In[number]; of a notebook that was never run, its place among the code cells, from 1."""
    default: str = specs.DEFAULT
    """Strategy of the session when it ran."""
    id: str = ""
    """As the notebook's file names it."""

    @property
    def line(self) -> str:
        """Options of a `%%ddl` cell, as they were typed."""
        return self.source.partition("\n")[0].split("%%ddl", 1)[1].strip() if self.kind == "ranks" else ""

    @property
    def options(self) -> parsing.CellOptions:
        """Options of a `%%ddl` cell."""
        return parsing.cell_options(self.line)


def code_cell(source: str, number: int, default: str, identifier: str = "") -> Cell:
    """A code cell of either kind. Blank lines before a cell's magic do not count, as in IPython."""
    kept = source.lstrip("\n")
    first = kept.partition("\n")[0].split()
    if first[:1] == ["%%ddl"]:
        return Cell("ranks", kept, number, default, identifier)
    return Cell("plain", source, number, default, identifier)


@dataclass(frozen=True)
class Notebook:
    """Cells in order, and those left out because they failed."""

    cells: tuple[Cell, ...]
    failed: tuple[Cell, ...] = ()
    path: Path | None = None
    """Its file, where it is known."""

    @property
    def name(self) -> str:
        """Of its file."""
        return self.path.name if self.path is not None else ""


def read(path: Path) -> Notebook:
    """Read a notebook's file. Raises UsageError where it is none."""
    cells, failed = [], []
    default = specs.DEFAULT
    placed = 0
    for raw in _raw_cells(path):
        source = "".join(raw["source"])
        if raw["cell_type"] == "markdown":
            cells.append(Cell("text", source, id=raw.get("id", "")))
        if raw["cell_type"] != "code":
            continue
        placed += 1
        cell = code_cell(source, raw.get("execution_count") or placed, default, raw.get("id", ""))
        default = _default_after(cell, default)
        if _failed(raw):
            failed.append(cell)
        elif source.strip():
            cells.append(cell)
    return Notebook(tuple(cells), tuple(failed), path)


def _raw_cells(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise UsageError(f"{path} is no notebook of format 4", "Give an .ipynb file.")
    cells: list[dict[str, Any]] = content["cells"]
    return cells


def _failed(raw: dict[str, Any]) -> bool:
    outputs = raw.get("outputs", [])
    tags = raw.get("metadata", {}).get("tags", [])
    return "raises-exception" in tags or any(output.get("output_type") == "error" for output in outputs)


def _default_after(cell: Cell, before: str) -> str:
    """The session's strategy after a cell that may have set it. Raises UsageError where its line cannot be read."""
    if cell.kind != "plain":
        return before
    for verb, rest in ddl_lines(cell.source):
        if verb in ("start", "restart", "strategy"):
            try:
                named = _strategies_of(verb, rest)
            except UsageError as error:
                raise UsageError(f"In[{cell.number}] has %ddl {verb} {rest}: {error.message}", error.remedy) from None
            before = named[0].text if named else before
    return before


def _strategies_of(verb: str, rest: str) -> tuple[specs.StrategySpec, ...]:
    args = parsing.verb_parser(verb, "").read(rest)
    text = args.spec if verb == "strategy" else args.strategy
    return parsing.strategies(text, getattr(args, "stage", None), getattr(args, "grid", None))


def in_order_of(notebook: Notebook, ran: Sequence[Cell]) -> tuple[Cell, ...]:
    """What ran, in the order of the notebook's file and with its text; what the file lacks after what ran before it."""
    waiting = list(ran)
    placed: list[Cell] = []
    for cell in notebook.cells:
        if cell.kind == "text":
            placed.append(cell)
            continue
        same = next((one for one in waiting if one.id and one.id == cell.id), None) or next(
            (one for one in waiting if one.source.strip() == cell.source.strip()), None
        )
        if same is not None:
            waiting.remove(same)
            placed.append(same)
    for cell in waiting:
        before = ran[: ran.index(cell)]
        place = placed.index(before[-1]) + 1 if before else 0
        placed.insert(place, cell)
    return tuple(placed)


def chosen(cells: Sequence[Cell], numbers: Sequence[int] | None) -> list[Cell]:
    """The `%%ddl` cells with these numbers, or all, and other cells that are named. Raises UsageError."""
    known = [cell.number for cell in cells if cell.kind != "text"]
    missing = [number for number in numbers or () if number not in known]
    if missing:
        valid = ", ".join(f"In[{cell.number}]" for cell in cells if cell.kind == "ranks")
        raise UsageError(
            f"there is no cell In[{missing[0]}] that ended well", f"The %%ddl cells are {valid or 'none'}."
        )
    found = [
        cell
        for cell in cells
        if (cell.kind == "ranks" and numbers is None) or (cell.kind != "text" and cell.number in (numbers or ()))
    ]
    if not any(cell.kind == "ranks" for cell in found):
        raise UsageError("there is no %%ddl cell to export", "A cell is exported once it has ended well.")
    return found


def with_text(cells: Sequence[Cell], kept: Sequence[Cell], *, all_text: bool) -> list[Cell]:
    """Those that are kept, in order, with all text or only that which stands directly before one of them."""
    result: list[Cell] = []
    text: list[Cell] = []
    for cell in cells:
        if cell.kind == "text":
            text.append(replace(cell))
        elif cell in kept:
            result += [*text, cell]
            text = []
        elif not all_text:
            text = []
    return result + (text if all_text else [])
