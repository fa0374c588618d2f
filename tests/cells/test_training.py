"""A training cell in a notebook: one cell, any strategy, and the picture that stays."""

from __future__ import annotations

import json
import re

import pytest

from tests.notebook import Notebook

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]

MODEL = """%%ddl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32, tie_word_embeddings=False,
)
tokens = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
"""

TRAIN = """
loader = DataLoader(data, batch_size=8, shuffle=True)
with ddl.model_init():
    model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = ddl.prepare(model, optimizer, loader)
losses = []
for batch in ddl.track(loader, epochs=2):
    loss = model(**batch).loss
    ddl.backward(loss)
    ddl.step(max_norm=1.0)
    losses.append(float(ddl.all_reduce_mean(loss.detach())))
"""

STRATEGIES = ["single", "ddp", "zero:1", "zero:2", "zero:3", "fsdp", "axonn:2x1x1"]


@pytest.fixture(scope="module")
def trained(ranks2):
    """The comparison of all strategies, run once for this module."""
    assert ranks2.run(MODEL, timeout=60).ename is None
    ranks2.run("%%ddl\nseen = []\nkept = 'from before'")
    shown = ranks2.run(
        f"%%ddl --strategy {','.join(STRATEGIES)} --name compare\nseen.append(ddl.strategy)\nkept = 'changed'\n{TRAIN}",
        timeout=150,
    )
    assert shown.ename is None, shown.text
    return shown


def test_one_cell_runs_under_every_strategy_and_ends_with_the_table(trained, ranks2):
    table = trained.displays[-1]
    rows = table["text/plain"].splitlines()
    for strategy in STRATEGIES:
        assert [row for row in rows if row.startswith(strategy)], table["text/plain"]
    assert "<table" in table["text/html"]
    last = {row.split()[0]: row.split()[2] for row in rows if row.split() and row.split()[0] in STRATEGIES}
    assert len(set(last.values())) == 1, last
    again = ranks2.run("%ddl runs").displays[-1]["text/plain"]
    assert [row.split()[0] for row in again.splitlines()[1 : len(STRATEGIES) + 1]] == STRATEGIES


def test_every_run_of_a_comparison_starts_with_the_same_variables(trained, ranks2):
    assert "[0-1] (['axonn:2x1x1'], 'changed')" in ranks2.run("%%ddl\n(seen[-1:], kept)").text


def test_each_run_leaves_a_picture_that_needs_no_widget(trained):
    pictures = [data for data in trained.displays if "<svg" in data.get("text/html", "")]
    assert len(pictures) >= len(STRATEGIES)
    assert not [data for data in trained.displays if "application/vnd.jupyter.widget-view+json" in data]
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", json.dumps([data["text/html"] for data in pictures]))
    assert all("loss" in data["text/plain"] for data in pictures[:-1])


def test_a_later_cell_goes_on_with_a_prepared_model_whatever_its_flag(trained, ranks2):
    shown = ranks2.run(
        "%%ddl --strategy ddp -o after\nbatch = next(iter(loader))\nbefore = model(**batch).loss\n"
        "ddl.backward(before)\nnorm = ddl.step(max_norm=1.0)\n(float(norm) > 0, type(model).__name__)"
    )
    assert shown.ename is None, shown.text
    first, second = ranks2.value("after")
    assert first == second
    assert first[0]


def test_a_run_can_be_drawn_again(trained, ranks2):
    again = ranks2.run("%ddl show zero:3")
    assert "zero:3" in again.displays[-1]["text/plain"]
    assert ranks2.run("%ddl show nothing").ename == "UsageError"


def test_single_is_one_process_also_for_raw_torch_distributed(ranks2):
    shown = ranks2.run(
        "%%ddl --strategy single\nimport os, torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\n"
        "(rank, world_size, ddl.world_size, dist.get_world_size(), os.environ['WORLD_SIZE'], int(t))"
    )
    assert "(0, 1, 1, 1, '1', 1)" in shown.text
    after = ranks2.run("%%ddl\nimport torch.distributed as dist\ndist.get_world_size()")
    assert "[0-1] 2" in after.text


def test_the_session_strategy_is_that_of_cells_that_name_none(ranks2):
    assert "zero:3" in ranks2.run("%ddl strategy zero --stage 3").stdout
    assert "[0-1] 'zero:3'" in ranks2.run("%%ddl\nddl.strategy").text
    assert "[0-1] 'ddp'" in ranks2.run("%%ddl --strategy ddp\nddl.strategy").text
    assert ranks2.run("%ddl strategy ddp").ename is None


def test_the_usual_variables_are_set_and_a_second_init_is_a_noted_no_op(ranks2):
    shown = ranks2.run(
        "%%ddl\nimport os, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "names = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'DS_ACCELERATOR'\n"
        "[os.environ[name] for name in names]"
    )
    assert shown.ename is None, shown.text
    assert "[0] ['0', '2', '0', '2', '0', 'cpu']" in shown.text
    assert "[1] ['1', '2', '1', '2', '0', 'cpu']" in shown.text
    assert ranks2.run("%%ddl\nimport deepspeed\ndeepspeed.init_distributed()", timeout=60).ename is None


def test_the_panel_moves_while_a_cell_runs_with_few_messages(ranks2):
    cell = ranks2.send("%%ddl\nimport time\nfor step in range(40):\n    ddl.log(speed=step)\n    time.sleep(0.1)")
    shown = ranks2.result(cell)
    assert shown.ename is None, shown.text
    assert "speed" in shown.displays[-1]["text/plain"]
    assert "at step 40" in shown.displays[-1]["text/plain"]
    assert shown.messages < 40


def test_nan_and_infinity_are_kept_and_marked_and_the_cell_goes_on(ranks2):
    shown = ranks2.run(
        "%%ddl --name wild\nfor value in (1.0, float('nan'), float('inf'), 2.0):\n    ddl.log(loss=value)\n'went on'"
    )
    assert shown.ename is None, shown.text
    assert "'went on'" in shown.text
    assert "nan" in ranks2.run("%ddl show wild").text.lower()
    assert ranks2.run("%%ddl\n1").ename is None


def test_a_displayed_model_does_not_stand_in_the_way_of_the_next(ranks2):
    cell = (
        "%%ddl\nimport torch\nlayer = torch.nn.Linear(4, 1)\n"
        "model, optimizer = ddl.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))\nmodel"
    )
    for _ in range(3):
        assert ranks2.run(cell).ename is None
    shown = ranks2.run("%%ddl\nddl.backward(model(torch.ones(2, 4)).pow(2).mean())\nddl.step()")
    assert shown.ename is None, shown.text


def test_without_a_reader_the_panel_is_plain_lines():
    book = Notebook()
    try:
        book.run("%ddl start -n 2", timeout=90, allow_stdin=False)
        shown = book.run(
            "%%ddl\nimport time\nfor step in range(30):\n    ddl.log(loss=step)\n    time.sleep(0.1)", allow_stdin=False
        )
        assert shown.ename is None, shown.text
        assert shown.updates == 0
        assert not [data for data in shown.displays if "application/vnd.jupyter.widget-view+json" in data]
        assert "loss" in shown.displays[-1]["text/plain"]
    finally:
        book.close()
