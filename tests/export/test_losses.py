"""A script gives the notebook's losses, under every launcher, and says what no script can have."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.strategies.ranks import ENVIRONMENT, ROOT

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]
BIN = Path(sys.executable).parent
RUN = [sys.executable, "-m", "ddl_magics.cli", "run"]
SPECS = ("ddp", "zero:2", "axonn:2x1x1")

DATA = """\
import numpy as np

generator = np.random.default_rng(0)
inputs = generator.normal(size=(44, 8)).astype("float32")
print("drawn")
%ddl push inputs"""
DEFINE = """\
%%ddl
import json

import torch
from torch.utils.data import DataLoader, TensorDataset

x = torch.from_numpy(inputs)
samples = TensorDataset(x, x.sum(1, keepdim=True))


def train(steps):
    # the last batch is smaller than the others
    with ddl.model_init():
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(samples, batch_size=8, shuffle=True)
    model, optimizer, loader = ddl.prepare(model, optimizer, loader)
    losses = []
    for x, y in ddl.track(loader, epochs=steps):
        loss = (model(x) - y).pow(2).mean()
        ddl.backward(loss)
        ddl.step(max_norm=1.0)
        losses.append(ddl.all_reduce_mean(loss.item()))
    return losses"""
TRAIN = """\
%%ddl --strategy {} --seed 3
losses = train(2)
f"LOSSES {{ddl.strategy}} {{json.dumps(losses)}}\""""
AGAIN = """\
%%ddl --seed 5 --steps 4
drawn = [torch.rand(1).item(), device.type, world_size]
f"LOSSES again {json.dumps([*train(3), drawn])}\""""


def losses_in(text: str) -> dict[str, list]:
    """What was printed as `LOSSES name [...]`."""
    return {name: json.loads(values) for name, values in re.findall(r"LOSSES (\S+) (\[.*\])", text)}


@pytest.fixture(scope="module")
def exported(ranks2, tmp_path_factory) -> tuple[dict[str, list], Path]:
    """The notebook's losses by strategy, and the script."""
    script = tmp_path_factory.mktemp("script") / "train.py"
    shown = []
    for cell in (DATA, DEFINE, TRAIN.format(",".join(SPECS)), "%%ddl\nloss", AGAIN):
        shown.append(ranks2.run(cell, timeout=120))
        assert bool(shown[-1].ename) == (cell == "%%ddl\nloss"), shown[-1].text
    told = ranks2.run(f"%ddl export {script}")
    assert told.ename is None, told.text
    first = shown[0].number
    assert told.stdout.splitlines() == [
        f"{script}: {', '.join(f'In[{first + n}]' for n in (0, 1, 2, 4))}",
        f"left out, since they did not end well: In[{first + 3}]",
        f"ddl-magics run {script} -n 2",
    ]
    return losses_in("\n".join(one.text for one in shown)), script


def start(*command: str | Path, **variables: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=150, check=False, env=env)


@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [
        ("ddp", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "SCRIPT"]),
        ("zero:2", [BIN / "mpiexec", "-n", "2", sys.executable, "SCRIPT", "--strategy", "zero:2"]),
        ("axonn:2x1x1", [*RUN, "SCRIPT", "--launcher", "local", "--strategy", "axonn:2x1x1", "-n", "2"]),
        pytest.param(
            "zero:2",
            [*RUN, "SCRIPT", "--nnodes", "2", "-n", "2", "--strategy", "zero:2"],
            marks=[
                pytest.mark.slurm,
                pytest.mark.skipif(shutil.which("srun") is None or "SLURM_CONF" not in os.environ, reason="no Slurm"),
            ],
        ),
    ],
    ids=["torchrun", "mpiexec", "ddl-magics run", "srun"],
)
def test_the_script_gives_the_losses_of_the_notebook(exported, strategy: str, launcher: list, request) -> None:
    notebook, script = exported
    command = [script if word == "SCRIPT" else word for word in launcher]
    in_job = "srun" in request.node.name
    done = start(*(["salloc", "-Q", "-N2", "-n2"] if in_job else []), *command)
    assert done.returncode == 0, done.stderr
    found = losses_in(done.stdout)
    assert set(found) == {strategy, "again"}
    assert len(found[strategy]) == 12
    assert found[strategy] == pytest.approx(notebook[strategy], rel=1e-6)
    assert found["again"][-1] == notebook["again"][-1]
    if strategy == "ddp":  # as the cell ran in the notebook
        assert found["again"][:-1] == pytest.approx(notebook["again"][:-1], rel=1e-6)
    assert len(found["again"]) == 5, "4 steps, and what was drawn"
    assert done.stdout.count("drawn") == 1


def test_a_cell_that_ran_again_is_exported_as_it_ran_last(ranks2, tmp_path: Path) -> None:
    first = ranks2.run("%%ddl\nvalue = 1").number
    ranks2.run("%%ddl\nvalue = 2\n1/0")
    ranks2.run("%%ddl\nprint(value)")
    ranks2.run("%%ddl\nvalue = 1")
    shown = ranks2.run(f"%ddl export {tmp_path / 'a.py'} --cells {first + 2}-{first + 3}")
    assert shown.ename is None, shown.text
    text = (tmp_path / "a.py").read_text()
    assert text.index(f"# In[{first + 3}]: %%ddl\nvalue = 1") < text.index(f"# In[{first + 2}]: %%ddl\nprint(value)")


def test_a_notebooks_file_gives_the_text_between_what_ran_and_the_order(ranks2, tmp_path: Path) -> None:
    for cell in ("%%ddl\nprint('second')", "%%ddl\nprint('first')", "%%ddl\nprint('not in the file')"):
        assert ranks2.run(cell).ename is None
    kinds = (("markdown", "# A title"), ("code", "%%ddl\nprint('first')"), ("markdown", "Between."),
             ("code", "%%ddl\nprint('second')"), ("code", "%%ddl\nprint('never ran')"))  # fmt: skip
    cells = [{"cell_type": kind, "source": source, "metadata": {}} for kind, source in kinds]
    (tmp_path / "book.ipynb").write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "cells": cells}))
    shown = ranks2.run(f"%ddl export {tmp_path / 'a.py'} --notebook {tmp_path / 'book.ipynb'}")
    assert shown.ename is None, shown.text
    text = (tmp_path / "a.py").read_text()
    wanted = ["# A title\n# =======", "print('first')\nprint('not in the file')", "# Between.", "print('second')"]
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("# In[") and line)
    places = [kept.find(words) for words in wanted]
    assert -1 not in places
    assert places == sorted(places), text
    assert "never ran" not in text
    assert '"""Cells of book.ipynb as' in text


def test_a_cell_in_the_background_counts_once_it_ended_well(ranks2, tmp_path: Path) -> None:
    number = ranks2.run("%%ddl --bg\nlater = 1").number
    ranks2.run("%ddl wait")
    failing = ranks2.run("%%ddl --bg\n1/0").number
    ranks2.run("%ddl wait")
    shown = ranks2.run(f"%ddl export {tmp_path / 'a.py'} --cells {number}")
    assert shown.ename is None, shown.text
    shown = ranks2.run(f"%ddl export {tmp_path / 'b.py'} --cells {failing}")
    assert f"there is no cell In[{failing}] that ended well" in shown.evalue
