"""What a script looks like that is made of a notebook's cells, and what no script can have. No ranks needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddl_magics.cli import main
from ddl_magics.errors import UsageError
from ddl_magics.export.cells import Cell, Notebook, code_cell, in_order_of, read
from ddl_magics.export.script import as_comment
from ddl_magics.export.writing import compose, export

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
RUFF = Path(sys.executable).parent / "ruff"


def notebook(*sources: str, failed: tuple[str, ...] = (), default: str = "ddp") -> Notebook:
    """Cells numbered from 1; one that begins with # MD is text."""
    cells, number = [], 0
    for source in sources:
        if source.startswith("# MD "):
            cells.append(Cell("text", source[5:]))
            continue
        number += 1
        cells.append(code_cell(source, number, default))
    return Notebook(tuple(cells), tuple(code_cell(source, 90, default) for source in failed))


def script(*sources: str, chosen=None, **kwargs) -> str:
    text, problems, _ = compose(notebook(*sources, **kwargs), "train.py", chosen)
    assert problems == []
    compile(text, "train.py", "exec")
    return text


def problems(*sources: str, chosen=None, **kwargs) -> list[str]:
    return list(map(str, compose(notebook(*sources, **kwargs), "train.py", chosen)[1]))


def cells_of(text: str) -> str:
    """What stands below the ranks' beginning."""
    return text.partition("\n\n\n")[2]


DATA = """\
%load_ext ddl_magics
# Numbers, always the same
from pathlib import Path
import numpy as np
data = np.arange(8.0)  # as many as there are
%ddl start -n 2
%ddl push data"""
TRAIN = """\
%%ddl --strategy zero:2 --seed 1
import torch
from torch import nn   # layers

with ddl.model_init():
    model = nn.Linear(8, 1)  # small
model = ddl.prepare(model)
text = '''
import this_is_text
'''
model(torch.from_numpy(data).float().to(device)).shape"""


def test_a_script_has_imports_first_then_the_ranks_then_the_cells_with_their_comments() -> None:
    assert (
        script("# MD ## Data\n\nNumbers.", DATA, TRAIN)
        == '''\
"""Cells of a notebook as a program for many ranks, written by ddl_magics.

Run it by torchrun, mpiexec or srun, or by `ddl-magics run train.py -n 2`.
"""

import argparse
import os
from pathlib import Path  # noqa: F401

import ddl_magics
import numpy as np
import torch
from torch import nn  # layers

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--strategy", default=os.environ.get("DDL_MAGICS_STRATEGY", "zero:2"))
ddl = ddl_magics.init(parser.parse_args().strategy, seed=0)
device = ddl.device


# Data
# ----
#
# Numbers.

# In[1]
# Numbers, always the same
data = np.arange(8.0)  # as many as there are


# In[2]: %%ddl --strategy zero:2 --seed 1
ddl.begin(seed=1)
with ddl.model_init():
    model = nn.Linear(8, 1)  # small
model = ddl.prepare(model)
text = \'\'\'
import this_is_text
\'\'\'
ddl.print(model(torch.from_numpy(data).float().to(device)).shape)
'''
    )


LOADERS = """\
%%ddl
import torch
from torch.utils.data import (DataLoader, Dataset, TensorDataset, IterableDataset,
    random_split, default_collate)
print(zeros, Tensor, eins, DataLoader, Dataset, TensorDataset, IterableDataset, random_split, default_collate)
"""


def test_scripts_are_clean_and_the_same_each_time(tmp_path: Path) -> None:
    cells = [
        "from __future__ import annotations\nfrom torch import zeros, Tensor, ones as eins\nimport os, sys\nsys.argv",
        LOADERS,
        "%%ddl\nimport os\nos.environ['X'] = '1'\nimport json\njson.dumps(torch.ones(1).tolist())",
        "%%ddl\nif rank == 0:\n    import csv\n    csv.writer\nimport numpy.linalg; numpy.linalg.norm",
    ]
    text = script(*cells, chosen=[1, 2, 3, 4])
    assert text == script(*cells, chosen=[1, 2, 3, 4])
    assert text.index("from __future__ import annotations") < text.index("import argparse")
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "order.py").write_text(script(*cells[:2], chosen=[1, 2]))
    for file, rules in (("train.py", "E4,E7,E9,F"), ("order.py", "E4,E7,E9,F,I")):
        ruff = [RUFF, "check", "--isolated", "--select", rules, "--ignore", "E702", file]
        done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{(tmp_path / file).read_text()}"


def test_imports_stay_where_moving_them_could_change_what_they_do() -> None:
    text = cells_of(
        script(
            "%%ddl\nimport os\nos.environ.get('A')\nimport csv, torch\nprint(csv, torch)",
            "%%ddl\nos.environ['OFFLINE'] = '1'\nimport datasets, peft\nimport torch, json\nprint(datasets, json)",
            "%%ddl\nimport torch\nimport peft\ntorch",
            "%%ddl\nF = 1\nprint(F)",
            "%%ddl\nimport torch.nn.functional as F\nprint(F.relu)",
        )
    )
    assert "import datasets, peft  # noqa: E402\nimport torch, json  # noqa: E402\nprint" in text
    assert "# In[3]: %%ddl\nimport peft  # noqa: E402, F401\nddl.print(torch)" in text
    assert "csv" not in text.partition("print")[0]
    assert "import torch.nn.functional as F  # noqa: E402" in text


def test_an_import_for_cells_that_are_left_out_is_left_out() -> None:
    text = script("%%ddl\nimport json, csv\nprint(csv)", "%%ddl\nprint(json)", chosen=[1])
    assert "import csv\n" in text
    assert "json" not in text


@pytest.mark.parametrize(
    ("last", "becomes"),
    [
        ("model", "ddl.print(model)"),
        ("model.shape, 1  # both", "ddl.print((model.shape, 1))  # both"),
        ("(model, 1)", "ddl.print((model, 1))"),
        ("[\n    model,\n]", "ddl.print([\n    model,\n])"),
        ("'é', model", "ddl.print(('é', model))"),
        ("model;", "model;"),
        ("print(model)", "print(model)"),
        ("ddl.barrier()", "ddl.barrier()"),
        ("describe()", "describe()"),
        ("'''A note.'''", "'''A note.'''"),
        ("model = 2", "model = 2"),
    ],
)
def test_what_the_notebook_showed_is_printed_by_rank_0(last: str, becomes: str) -> None:
    text = script(f"%%ddl\ndef describe():\n    print(1)\nmodel = 1\n{last}")
    assert text.endswith(f"model = 1\n{becomes}\n")


def test_what_a_cell_of_the_kernel_printed_once_is_printed_once() -> None:
    text = script("data = 1\nfor _ in range(2):\n    print(data)\n%ddl push data", "%%ddl\nprint(data)")
    assert "    ddl.print(data)\n" in text
    assert text.endswith("\nprint(data)\n")


def test_names_that_a_cell_finds_are_there_also_after_a_cell_bound_them() -> None:
    text = cells_of(script("%%ddl\nrank = 5\nprint(rank)", "%%ddl\nprint(rank, world_size)"))
    assert text.endswith("rank = ddl.rank\nprint(rank, world_size)\n")
    assert "rank = ddl.rank\nworld_size = ddl.world_size\n\n" in script("%%ddl\nprint(rank, world_size)")


# Strategies and other options

PREPARE = "model = ddl.prepare(object)"


def test_the_first_cell_gives_its_options_to_init() -> None:
    text = script(f"%%ddl --seed 3 --precision bf16-mixed --checkpoint-activations --steps 5\n{PREPARE}")
    assert 'strategy, precision="bf16-mixed", checkpoint_activations=True, steps=5, seed=3)' in text
    assert "ddl.begin" not in text


def test_a_cell_with_other_options_begins_with_them() -> None:
    text = cells_of(
        script(
            f"%%ddl --seed 3 --precision bf16-mixed\n{PREPARE}",
            "%%ddl\nx = 1",
            f"%%ddl\n{PREPARE}",
            f"%%ddl --precision bf16-mixed --seed 4\n{PREPARE}",
            "%%ddl --seed 5\nprint(x)",
        )
    )
    assert "# In[2]: %%ddl\nx = 1" in text
    assert f'# In[3]: %%ddl\nddl.begin(precision="32")\n{PREPARE}' in text
    assert f"--seed 4\nddl.begin(seed=4)\n{PREPARE}" in text
    assert "--seed 5\nddl.begin(seed=5)\nprint(x)" in text


def test_a_cell_that_calls_a_function_of_another_cell_begins_anew_too() -> None:
    train = f"%%ddl\ndef train():\n    {PREPARE}"
    text = cells_of(script(train, "%%ddl\ntrain()", "%%ddl\nddl.print(ddl.all_gather(rank))"))
    assert text.count("ddl.begin()\ntrain()") == 1
    assert text.count("ddl.begin") == 1


@pytest.mark.parametrize(
    ("sources", "default"),
    [
        ([f"%%ddl --strategy zero:3\n{PREPARE}"], "zero:3"),
        ([f"%%ddl\n{PREPARE}"], "zero:1"),
        ([f"%%ddl --strategy single,ddp,zero:3\n{PREPARE}"], "ddp"),
        ([f"%%ddl --strategy single,zero:1\n{PREPARE}"], "zero:1"),
        ([f"%%ddl --stage 3\n{PREPARE}", f"%%ddl --strategy single,ddp\n{PREPARE}"], "zero:3"),
        ([f"%%ddl --strategy single\n{PREPARE}"], "single"),
    ],
)
def test_the_script_has_one_strategy_that_its_option_changes(sources: list[str], default: str) -> None:
    session = "zero:1" if default == "zero:1" else "ddp"
    text = script("%%ddl\nprint(1)", *sources, default=session)
    assert f'"DDL_MAGICS_STRATEGY", "{default}"))' in text
    assert "strategy=" not in text.replace("parser.parse_args().strategy", "")


def test_cells_that_name_different_strategies_keep_them() -> None:
    lines = ("%%ddl --strategy ddp", "%%ddl --strategy zero:3 --seed 1", "%%ddl")
    text = script(*(f"{line}\n{PREPARE}" for line in lines))
    assert '"ddp"))' in text
    assert 'ddl.begin(strategy="zero:3", seed=1)' in text
    assert f"# In[3]: %%ddl\nddl.begin()\n{PREPARE}" in text
    (said,) = problems(f"%%ddl --strategy ddp\n{PREPARE}", f"%%ddl --strategy single\n{PREPARE}")
    assert said.startswith("In[2] line 1: %%ddl --strategy single (it is for one process")


# What the notebook gave to the ranks


def test_cells_that_made_what_was_pushed_come_along_and_others_do_not() -> None:
    text = cells_of(
        script(
            "import numpy as np\nsize = 4",
            "unrelated = 1\nprint(unrelated)",
            "data = np.zeros(size)\nother = 2",
            "data[0] = 1",
            "np.random.shuffle(data)",
            "%ddl push data other",
            "data = None",
            "%%ddl\nprint(data)",
        )
    )
    assert [line for line in text.splitlines() if line.startswith("# In")] == [
        "# In[1]", "# In[3]", "# In[4]", "# In[5]", "# In[8]: %%ddl",
    ]  # fmt: skip


def test_pushed_names_that_no_cell_makes_are_named() -> None:
    assert problems("%ddl push data", "%%ddl\nx = 1\nprint(data)") == [
        "In[2] line 3: print(data) (no cell that ended well makes 'data', which it was given by the notebook)"
    ]
    (said,) = problems("%%ddl\nx = 1", "%ddl pull x\ny = sum(x)\n%ddl push y", "%%ddl\nprint(y)")
    assert said == "In[2] line 1: %ddl pull x (it comes from the ranks, and a script has no notebook to go through)"
    (said,) = problems("%%ddl -o x\n1", "y = sum(x)\n%ddl push y", "%%ddl\nprint(y)")
    assert said.startswith("In[1] line 1: %%ddl -o x ('x' comes from the ranks")


def test_names_that_only_other_cells_make_are_named() -> None:
    cells = ["%%ddl\nx = 1", "%%ddl\ndef f():\n    return x\nprint(f(), [y for y in range(x)])"]
    assert problems(*cells, chosen=[2]) == [
        "In[2] line 4: print(f(), [y for y in range(x)]) (nothing in the script makes 'x'; In[1] does)"
    ]
    assert problems("%%ddl\nprint(x)", failed=("%%ddl\nx = 1\n1/0",)) == [
        "In[1] line 2: print(x) (nothing in the script makes 'x'; In[90] did not end well)"
    ]
    assert problems(*cells) == []


# What no script can have

UNFIT = """\
%%ddl
%matplotlib inline
files = !ls
import torch
torch?
if rank == 0:
    %time x = 1
for y in range(2):
    print(y)
    display(y)
await something()
def fine():
    _ = [_ for _ in range(3)]
    async def inner():
        await something()
from IPython.display import HTML
!echo a \\
   b
_"""

COMMENTED = """
# %matplotlib inline
# files = !ls
# torch?
if rank == 0:
    pass  # %time x = 1
for y in range(2):
    print(y)
    pass  # display(y)
# await something()
def fine():
    _ = [_ for _ in range(3)]
    async def inner():
        await something()
# from IPython.display import HTML
# !echo a \\
#    b
# _
"""


def test_every_line_that_no_script_can_have_is_named_with_its_cell_and_line(tmp_path: Path) -> None:
    named = problems("%%ddl\nsomething = 1", UNFIT, "%%ddl\n%%bash\nls", "%%ddl --ranks 0\nx = 1", "%%ddl\n)(")
    assert named == [
        "In[2] line 2: %matplotlib inline (a magic)",
        "In[2] line 3: files = !ls (the shell)",
        "In[2] line 5: torch? (a magic)",
        "In[2] line 7: %time x = 1 (a magic)",
        "In[2] line 10: display(y) (rich display needs a notebook: print it)",
        "In[2] line 11: await something() (await outside a function is IPython's)",
        "In[2] line 16: from IPython.display import HTML (IPython needs a notebook)",
        "In[2] line 17: !echo a \\ (the shell)",
        "In[2] line 19: _ (only IPython knows this name)",
        "In[3] line 2: %%bash (a magic, and what stands below it)",
        "In[4] line 1: %%ddl --ranks 0 (all ranks run a script: write `if rank == 0:` into the cell)",
        "In[5] line 1: %%ddl (it is no Python)",
    ]
    file = tmp_path / "train.py"
    with pytest.raises(UsageError, match="nothing was written") as raised:
        export(notebook("%%ddl\nsomething = 1", UNFIT), str(file), None, force=False)
    assert str(raised.value).count("In[2] line") == 9
    assert not file.exists()


def test_force_writes_them_as_comments(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    told = export(notebook("%%ddl\nsomething = 1", UNFIT), str(file), None, force=True)
    assert told.count("not in the script: In[2] line") == 9
    text = file.read_text()
    compile(text, "train.py", "exec")
    assert text.endswith(COMMENTED)
    with pytest.raises(UsageError, match="is there already"):
        export(notebook("%%ddl\nx = 1"), str(file), None, force=False)
    assert file.read_text() == text


def test_a_cell_whose_options_cannot_be_read_is_named_among_the_others_and_force_makes_it_a_comment(
    tmp_path: Path,
) -> None:
    wrong = "%%ddl --nonsense\nx = 1"
    assert problems(wrong, "%%ddl --strategy zero:9\nx = 1", "%%ddl\n!ls") == [
        "In[1] line 1: %%ddl --nonsense (%%ddl has no option '--nonsense'. Did you mean '--seed'?)",
        "In[2] line 1: %%ddl --strategy zero:9 (ZeRO has no stage '9'. Valid: zero:1, zero:2, zero:3.)",
        "In[3] line 2: !ls (the shell)",
    ]
    export(notebook(wrong, "%%ddl\ny = 2"), str(tmp_path / "a.py"), None, force=True)
    assert "# x = 1\n" in (tmp_path / "a.py").read_text()


def test_a_notebook_is_never_overwritten(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": ["%%ddl\nx = 1"], "metadata": {}, "outputs": [], "execution_count": 1}
    for name in ("a.ipynb", "notebook.json"):
        (tmp_path / name).write_text(json.dumps({"cells": [cell]}))
        before = (tmp_path / name).read_bytes()
        with pytest.raises(UsageError, match="is a notebook, which a script would overwrite"):
            export(read(tmp_path / name), str(tmp_path / name), None, force=True)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(UsageError, match="is a notebook"):
        export(notebook("%%ddl\nx = 1"), str(tmp_path / "new.ipynb"), None, force=False)


@pytest.mark.parametrize("words", ["5-3", "x-"])
def test_cells_that_cannot_be_are_one_line_in_a_terminal(words: str, capsys) -> None:
    assert main(["export", "a.ipynb", "out.py", "--cells", words]) == 1
    assert capsys.readouterr().err == f"ddl-magics: {words} is not a list of cells. For example --cells 3-5,9.\n"


def test_numbers_and_files_that_cannot_be_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no cell In\[7\] that ended well. The %%ddl cells are In\[1\]"):
        compose(notebook("%%ddl\nx = 1"), "train.py", [7])
    with pytest.raises(UsageError, match="there is no %%ddl cell to export"):
        compose(notebook("x = 1"), "train.py", None)
    with pytest.raises(UsageError, match="Name a file in a folder that is there"):
        export(notebook("%%ddl\nx = 1"), str(tmp_path / "none" / "train.py"), None, force=False)
    (tmp_path / "a.ipynb").write_text("{}")
    with pytest.raises(UsageError, match="is no notebook of format 4"):
        read(tmp_path / "a.ipynb")


# Files


def test_a_file_gives_text_and_order_and_leaves_out_what_failed(tmp_path: Path) -> None:
    def cell(kind: str, source: str, name: str, **more) -> dict:
        more = {"outputs": [], "execution_count": None} | more if kind == "code" else more
        return {"cell_type": kind, "source": source.splitlines(keepends=True), "id": name, "metadata": {}, **more}

    path = tmp_path / "a.ipynb"
    error = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}
    cells = [
        cell("markdown", "# Title", "t"),
        cell("code", "%load_ext ddl_magics\n%ddl start --strategy zero:3", "s"),
        cell("code", f"%%ddl\n{PREPARE}", "p"),
        cell("code", "%%ddl\n1/0", "f", outputs=[error]),
        cell("code", "%%ddl\nprint(2)", "q"),
    ]
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))
    found = read(path)
    text, said, parts = compose(found, "train.py", None)
    assert said == []
    assert [part.cell.number for part in parts] == [2, 4]
    assert [one.number for one in found.failed] == [3]
    assert "Cells of a.ipynb as" in text
    assert '"zero:3"))' in text
    assert "# Title\n# =====\n" in text

    ran = [code_cell("%%ddl\nprint(3)", 7, "ddp", "q"), code_cell("%%ddl\nprint('new')", 8, "ddp", "n"),
           code_cell(f"%%ddl\n{PREPARE}", 9, "ddp", "p")]  # fmt: skip
    assert [one.number for one in in_order_of(found, ran)] == [0, 9, 7, 8]


def test_text_becomes_comments_with_headings_underlined_and_long_lines_filled() -> None:
    long = "word " * 30
    assert as_comment(f"# One\n\n{long}\nmore\n- a\n- {long}\n```\n# code\n```\n<b>x</b>") == "\n".join(
        ["# One", "# ===", "#", f"# {' '.join(['word'] * 19)}", f"# {' '.join(['word'] * 11)} more", "# - a",
         f"# - {' '.join(['word'] * 19)}", f"#   {' '.join(['word'] * 11)}", "# ```", "# # code", "# ```", "# x"]
    )  # fmt: skip


def test_a_terminal_exports_a_file(tmp_path: Path) -> None:
    source = ROOT / "examples" / "00_quickstart.ipynb"
    command = [sys.executable, "-m", "ddl_magics.cli", "export", str(source), "train.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ddl-magics run train.py -n 2"
    compile((tmp_path / "train.py").read_text(), "train.py", "exec")
    again = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr) == (1, "ddl-magics: train.py is there already. --force replaces it.\n")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_notebooks_of_the_tutorial_become_scripts(path: Path) -> None:
    text, said, parts = compose(read(path), "train.py", None)
    compile(text, "train.py", "exec")
    assert len(parts) >= 3
    assert not [one for one in said if "for one process" not in str(one) and "did not end well" not in str(one)], said
