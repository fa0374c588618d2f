"""The documentation is true: its examples run, its links lead somewhere, and it names every word a user can type."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from ddl_magics import parsing
from ddl_magics.magics import VERBS
from tests.notebook import ANSI

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
BLOCK = re.compile(r"^```(python|python fails|python script|text shown)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A cell, one that must fail, a script for torchrun, and lines that the cell above shows."""
CELLS = ("python", "python fails", "text shown")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def blocks(page: Path, *kinds: str) -> list[tuple[str, str]]:
    """The blocks of a page of these kinds, in order: (kind, content)."""
    return [block for block in BLOCK.findall(page.read_text()) if block[0] in kinds]


def not_shown(lines: str, shown: str) -> list[str]:
    """Those of the lines that are not in the text, whatever the spaces between words and the number of a cell."""
    plain = [re.sub(r"In\[\d+\]", "In[]", " ".join(line.split())) for line in (lines, *lines.splitlines(), shown)]
    return [line for line in plain[1:-1] if line not in plain[-1]]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.mpi
@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, *CELLS)], ids=name)
def test_every_example_runs_or_fails_as_the_page_says(page: Path, ranks2) -> None:
    shown = None
    for kind, content in blocks(page, *CELLS):
        if kind == "text shown":
            assert not not_shown(content, shown.text), shown.text
        else:
            shown = ranks2.run(content, timeout=120)
            assert bool(shown.ename) == (kind == "python fails"), f"{content}\n{shown.text}"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python script")], ids=name)
def test_every_script_runs_under_torchrun(page: Path, tmp_path: Path) -> None:
    for _, code in blocks(page, "python script"):
        script = tmp_path / "train.py"
        script.write_text(code)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
                   "--rdzv-endpoint=localhost:0", str(script)]  # fmt: skip
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "on 2 ranks" in done.stdout


@pytest.mark.mpi
@pytest.mark.timeout(240)
def test_the_debugging_notebook_runs_and_each_cell_shows_what_the_text_below_it_says(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "04_debugging.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()  # raises where a cell fails that is not tagged `raises-exception`
    text, errors, checked = "", 0, 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            text = ANSI.sub("", "\n".join(map(text_of, cell.outputs)))
            failed = [output.ename for output in cell.outputs if output.output_type == "error"]
            assert failed == ["CellError"] * ("raises-exception" in cell.metadata.get("tags", [])), cell.source
            errors += len(failed)
        for kind, content in BLOCK.findall(cell.source if cell.cell_type == "markdown" else ""):
            assert kind == "text shown"
            assert not not_shown(content, text), text
            checked += 1
    assert (errors, checked) == (4, 15)


def text_of(output) -> str:
    """An output of a saved notebook, as a reader sees it."""
    if output.output_type == "stream":
        return output.text
    return "\n".join(output.traceback) if output.output_type == "error" else output.data["text/plain"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = [target for target, _ in LINK.findall(page.read_text()) if "://" not in target]
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_the_page_of_words_has_every_verb_and_option() -> None:
    page = (ROOT / "docs" / "magics.md").read_text()
    assert not [verb for verb in VERBS if f"`{verb}" not in page]
    parsers = [parsing.cell_parser(), *(parsing.verb_parser(verb, "") for verb in VERBS)]
    options = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    assert not [option for option in sorted(options) if not re.search(rf"[`\[]{option}\b", page)]
