"""Makes the student versions of the tutorial's notebooks: the same cells, without the solutions of the exercises.

    python examples/make_student.py            # writes examples/student/
    python examples/make_student.py --check    # writes nothing; status 1 when a file there is not up to date

A cell with the tag `exercise` holds its solution between two comments, below a `# TODO` that says what to do:

    # TODO: the sum over all ranks, by a reduce_scatter and an all_gather
    # SOLUTION
    ...
    # END

The student version keeps the TODO and raises NotImplementedError with its words in place of the solution. The cell
below, with the tag `check`, tries what the student wrote; in the student version it may fail without ending Run All.
Limits: a solution is whole lines, and solutions do not nest.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat

HERE = Path(__file__).parent
STUDENT = HERE / "student"
SOLUTION, END, TODO = "# SOLUTION", "# END", "# TODO"
WITHOUT_EXERCISE = ("00_", "04_")
"""Notebooks that have no student version."""
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
"""Target of a link in markdown."""


class MarkError(Exception):
    """The marks of an exercise do not fit; the message names the notebook and the cell."""


def tags(cell: nbformat.NotebookNode) -> list[str]:
    """Tags of a cell, a list that may be changed."""
    return cell.metadata.setdefault("tags", [])


def without_solution(source: str) -> str:
    """Return the source of an exercise for a student. Raises ValueError where the marks do not fit."""
    kept: list[str] = []
    inside = False
    for line in source.splitlines():
        mark = line.strip()
        if mark == SOLUTION:
            if inside:
                raise ValueError(f"a second {SOLUTION} before {END}")
            inside = True
            indent = line[: len(line) - len(line.lstrip())]
            kept.append(f"{indent}raise NotImplementedError({task(kept)!r})")
        elif mark == END:
            if not inside:
                raise ValueError(f"{END} without {SOLUTION}")
            inside = False
        elif not inside:
            kept.append(line)
    if inside:
        raise ValueError(f"{SOLUTION} without {END}")
    return "\n".join(kept)


def task(lines: list[str]) -> str:
    """Words of the TODO comment at the end of these lines, which may go over several."""
    words: list[str] = []
    for line in reversed(lines):
        comment = line.strip()
        if not comment.startswith("#"):
            break
        if comment.startswith(TODO):
            return " ".join(["TODO" + comment.removeprefix(TODO), *words])
        words.insert(0, comment.lstrip("# "))
    raise ValueError(f"{SOLUTION} without a {TODO} comment right above it")


def from_below(link: re.Match[str]) -> str:
    """Return a link's target as seen from the folder of the student versions, where those are that it has."""
    target = link.group()
    stays = "://" in target or target.startswith("#") or re.match(r"\d\d_\w+\.ipynb", target)
    here = stays and not target.startswith(WITHOUT_EXERCISE)
    return target if here else f"../{target}"


def student_version(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    """Return the student version of a notebook, without outputs; None where it has no exercise."""
    student = nbformat.from_dict(notebook)
    exercises = 0
    for number, cell in enumerate(student.cells):
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(from_below, cell.source)
            continue
        cell.outputs, cell.execution_count = [], None
        marked = any(line.strip() == SOLUTION for line in cell.source.splitlines())
        if marked != ("exercise" in cell.metadata.get("tags", [])):
            raise MarkError(f"cell {number}: the tag 'exercise' and a {SOLUTION} go together")
        if marked:
            exercises += 1
            try:
                cell.source = without_solution(cell.source)
            except ValueError as error:
                raise MarkError(f"cell {number}: {error}") from None
        elif "check" in cell.metadata.get("tags", []):
            tags(cell).append("raises-exception")
    return student if exercises else None


def text_of(path: Path) -> str | None:
    """Return the student version of a notebook's file, as it is written."""
    try:
        student = student_version(nbformat.read(path, as_version=4))
    except MarkError as error:
        raise MarkError(f"{path.name}, {error}") from None
    return None if student is None else nbformat.writes(student) + "\n"


def main() -> int:
    """Write the student versions, or say which are not up to date."""
    parser = argparse.ArgumentParser(description="Make the student versions of the notebooks.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a file is not up to date")
    check = parser.parse_args().check
    stale = 0
    for path in sorted(HERE.glob("[0-9][0-9]_*.ipynb")):
        wanted = text_of(path)
        target = STUDENT / path.name
        if wanted is None or (target.exists() and target.read_text(encoding="utf-8") == wanted):
            continue
        stale += 1
        print(f"{target.relative_to(HERE.parent)} {'is not up to date' if check else 'written'}")
        if not check:
            STUDENT.mkdir(exist_ok=True)
            target.write_text(wanted, encoding="utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
