"""The documentation is true: its examples run, its links lead somewhere, and it names every word a user can type."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddl_magics import parsing
from ddl_magics.magics import VERBS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
BLOCK = re.compile(r"^```python( script)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def blocks(page: Path, kind: str) -> list[str]:
    """The Python blocks of a page: `cell` of a notebook, or `script` for torchrun."""
    found = BLOCK.findall(page.read_text())
    return [code for script, code in found if bool(script) == (kind == "script")]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.mpi
@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "cell")], ids=name)
def test_every_example_runs(page: Path, ranks2) -> None:
    for code in blocks(page, "cell"):
        shown = ranks2.run(code, timeout=120)
        assert shown.ename is None, f"{code}\n{shown.text}"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "script")], ids=name)
def test_every_script_runs_under_torchrun(page: Path, tmp_path: Path) -> None:
    for code in blocks(page, "script"):
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
