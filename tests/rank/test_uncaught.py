"""A user's mistake in a plain program shows their own lines, and no traceback of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(60)
def test_a_mistake_shows_the_programs_own_lines_and_one_of_ours(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    lines = ["from ddl_magics.rank import uncaught", "from ddl_magics.strategies import spec", "uncaught.install()", "",
             "def begin():", "    spec.parse('zero:9')", "", "begin()"]  # fmt: skip
    script.write_text("\n".join(lines))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert done.stderr == (
        f'  File "{script}", line 8, in <module>\n    begin()\n'
        f"  File \"{script}\", line 6, in begin\n    spec.parse('zero:9')\n"
        "SpecError: ZeRO has no stage '9'. Valid: zero:1, zero:2, zero:3.\n"
    )


@pytest.mark.timeout(60)
def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from ddl_magics.rank import uncaught\nuncaught.install()\nuncaught.install()\n1 / 0\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
