"""Puts a script together: what it says of itself, imports, the ranks' beginning, and the cells in order."""

from __future__ import annotations

import ast
import re
import textwrap
from typing import TYPE_CHECKING

from ddl_magics.export import body, imports, options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.export.cells import Cell
    from ddl_magics.export.reading import Part, Problem

CONTEXT = ("rank", "world_size", "local_rank", "device")
"""Names that a cell finds beside `ddl`."""
WIDTH = 98
"""Of a line of text, from its first word on."""

HTML = re.compile(r"</?[a-z][a-z0-9]*(?:\s[^>]*)?>")
"""Tags in text, `<details>` for one."""

OWN_IMPORTS = "import argparse\nimport os\nimport ddl_magics"
BEGIN = """
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--strategy", default=os.environ.get("DDL_MAGICS_STRATEGY", {default}))
ddl = ddl_magics.init(parser.parse_args().strategy{options})
"""


def write(
    cells: Sequence[Cell],
    parts: Sequence[Part],
    others: Sequence[Part],
    plan: options.Plan,
    problems: Sequence[Problem],
    names: tuple[str, str],
) -> str:
    """Give the whole text.

    Parameters
    ----------
    cells
        What the script has, with text, in order.
    parts
        The code cells among them, in the same order.
    others
        Code cells of the notebook that are not in the script.
    plan
        Their options.
    problems
        Lines that are written as comments.
    names
        Of the notebook's file, empty where nobody knows, and of the script.
    """
    drawn, gone, stays = imports.draw(parts, others)
    for node in ast.parse(OWN_IMPORTS).body:
        drawn.add(node)  # type: ignore[arg-type]
    nothing = body.give_nothing(parts)
    bodies: list[str] = []
    for place, part in enumerate(parts):
        text = body.Body(part)
        text.stay(stays[place])
        text.print_last(nothing)
        if part.cell.kind == "plain":
            text.print_once()
        text.take(gone[place] | body.removed(part))
        for problem in problems:
            if problem.number == part.cell.number and problem.last:
                text.comment_out(problem)
        bodies.append(text.text())
    blocks = [_docstring(*names), drawn.text(), _begin(parts, plan)]
    blocks += _blocks(cells, parts, plan, bodies)
    return "\n\n".join(block.strip("\n") for block in blocks[:2]) + "\n\n" + "\n\n\n".join(
        block.strip("\n") for block in blocks[2:]) + "\n"  # fmt: skip


def _docstring(name: str, file: str) -> str:
    whence = f"Cells of {name}" if name else "Cells of a notebook"
    plain = re.sub(r'[\\"]', "_", f"{whence} as a program for many ranks, written by ddl_magics.")
    runs = re.sub(r'[\\"]', "_", f"Run it by torchrun, mpiexec or srun, or by `ddl-magics run {file} -n 2`.")
    return f'"""{plain}\n\n{runs}\n"""'


def _begin(parts: Sequence[Part], plan: options.Plan) -> str:
    read = {name for part in parts if part.cell.kind == "ranks" for name in part.names.all_needs}
    lines = [f"{name} = ddl.{name}" for name in CONTEXT if name in read]
    return BEGIN.format(default=options.literal(plan.default), options=plan.init) + "\n".join(lines)


def _blocks(cells: Sequence[Cell], parts: Sequence[Part], plan: options.Plan, bodies: Sequence[str]) -> list[str]:
    blocks: list[str] = []
    text_before: list[str] = []
    place = 0
    rebound: set[str] = set()
    for cell in cells:
        if cell.kind == "text":
            text_before.append(as_comment(cell.source))
            continue
        part, text = parts[place], bodies[place]
        lines = [f"# In[{cell.number}]: %%ddl {cell.line}".rstrip() if cell.kind == "ranks" else f"# In[{cell.number}]"]
        if place in plan.begins:
            lines.append(f"ddl.begin({plan.begins[place]})")
        again = [name for name in CONTEXT if name in rebound & set(part.names.all_needs)]
        if cell.kind == "ranks":
            lines += [f"{name} = ddl.{name}" for name in again]
            rebound -= set(again)
        rebound |= set(CONTEXT) & set(part.names.sets)
        if text or len(lines) > 1:
            blocks.append("\n\n".join([*text_before, "\n".join([*lines, text])]))
            text_before = []
        place += 1
    return [*blocks, *text_before]


def as_comment(markdown: str) -> str:
    """Text of a notebook as comment lines: headings underlined, paragraphs with long lines filled anew."""
    lines: list[str] = []
    paragraph: list[str] = []
    fenced = False

    def end_paragraph() -> None:
        if any(len(line) > WIDTH for line in paragraph):
            hang = re.match(r"\s*(?:[-*+]\s+|\d+\.\s+)?", paragraph[0])
            indent = " " * len(hang[0]) if hang else ""
            words = " ".join([paragraph[0].rstrip(), *(line.strip() for line in paragraph[1:])])
            lines.extend(textwrap.wrap(words, WIDTH, subsequent_indent=indent, break_long_words=False))
        else:
            lines.extend(paragraph)
        paragraph.clear()

    for written in markdown.strip().split("\n"):
        line = written if fenced else HTML.sub("", written)
        heading = None if fenced else re.match(r"(#{1,6})\s+(.*)", line)
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        if heading or fence or fenced or not line.strip() or line.lstrip().startswith("|"):
            end_paragraph()
            title = heading[2].strip() if heading else ""
            lines += [title, ("=" if heading[1] == "#" else "-") * min(len(title), WIDTH)] if heading else [line]
            continue
        if re.match(r"\s*([-*+]|\d+\.)\s", line):
            end_paragraph()
        paragraph.append(line)
    end_paragraph()
    return "\n".join(f"# {line}".rstrip() for line in lines)
