"""`%ddl check`: which ranks hold the same, told in a table, also of models that are sharded and after a failure."""

from __future__ import annotations

import pytest

from tests.notebook import HOLD

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]

TRAIN = """
import torch
from torch import nn
with ddl.model_init():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
data = torch.utils.data.TensorDataset(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, schedule, loader = ddl.prepare(model, optimizer, schedule, loader)
for (x,) in ddl.track(loader):
    ddl.backward(model(x).square().mean())
    ddl.step(max_norm=1.0)
"""


def check(book, names):
    """Lines of the table under its head, by their first words and the rest."""
    shown = book.run(f"%ddl check {names}")
    assert shown.ename is None, shown.text
    (table,) = shown.displays
    assert "<table" in table["text/html"]
    return [" ".join(line.split()) for line in table["text/plain"].splitlines()[1:]]


def test_values_that_agree_stand_on_one_line_and_ranks_that_differ_are_named(ranks2):
    ranks2.run(
        "%%ddl\nimport torch\nsame = torch.arange(6.)\nmine = torch.zeros(3) + rank\nlr = 0.1\nif rank:\n    late = 1"
    )
    assert check(ranks2, 'same, mine lr late {"a":same}["a"] nothing 1/0') == [
        "same 0-1 float32 [6] cpu equal",
        "mine 0 float32 [3] cpu",
        "1 float32 [3] cpu differs: 3 elements, by at most 1",
        "lr 0-1 float 0.1 equal",
        "late 1 int 1 on one rank only",
        "0 there is no such variable",
        '{"a":same}["a"] 0-1 float32 [6] cpu equal',
        "nothing 0-1 there is no such variable",
        "1/0 0-1 ZeroDivisionError: division by zero",
    ]


def test_a_parameter_that_differs_is_named_with_how_far(ranks2):
    ranks2.run(
        "%%ddl --no-panel\nfrom torch import nn\ntorch.manual_seed(0)\n"
        "net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))\n"
        "if rank == 1:\n    nn.init.constant_(net[1].bias, 0.5)\n    net[1].bias.data[0] = float('nan')"
    )
    first, second = check(ranks2, "net")
    assert first == "net 0 Sequential, 4 parameters, 48.0 B"
    assert "differs in 1 of 4 parameters, first 1.bias: 2 elements, by at most" in second
    assert second.endswith("1 NaN here")


def test_random_states_are_compared_and_checking_leaves_them(ranks2):
    ranks2.run("%%ddl --seed 5\nimport random\nrandom.random()\nif rank:\n    torch.rand(1)")
    expected = ["rng 0 random states", "1 random states differs in 1 of 3 random states: torch"]
    assert check(ranks2, "rng") == expected
    assert check(ranks2, "rng") == expected


@pytest.mark.parametrize(
    ("strategy", "model", "optimizer"),
    [
        ("ddp", "equal", "equal"),
        ("zero:1", "equal", "2 of 3 tensors sharded over ranks 0-1; the rest is equal"),
        ("zero:3", "5 of 6 tensors sharded over ranks 0-1; the rest is equal",
         "2 of 3 tensors sharded over ranks 0-1; the rest is equal"),
        ("axonn:2x1x1", "4 of 6 tensors sharded over ranks 0-1; the rest is equal",
         "8 of 18 tensors sharded over ranks 0-1; the rest is equal"),
    ],
    ids=["ddp", "zero:1", "zero:3", "axonn"],
)  # fmt: skip
def test_shards_of_a_prepared_model_are_known_as_shards(ranks2, strategy, model, optimizer):
    assert ranks2.run(f"%%ddl --no-panel --strategy {strategy}\n{TRAIN}").ename is None
    of_model, of_optimizer, *others = check(ranks2, "model optimizer schedule loader")
    assert of_model.startswith(f"model 0-1 Sequential under {strategy}, 6 parameters, ")
    assert of_model.endswith(f" {model}")
    assert of_optimizer.endswith(f" {optimizer}")
    assert others == ["schedule 0-1 StepLR equal", "loader 0-1 RankLoader, length 2 equal"]


def test_a_whole_parameter_of_a_sharded_model_that_differs_is_found(ranks2):
    assert ranks2.run(f"%%ddl --no-panel --strategy axonn:2x1x1\n{TRAIN}").ename is None
    ranks2.run("%%ddl\nif rank:\n    ddl.unwrap(model)[1].bias.data[3] += 1\n    optimizer.param_groups[0]['lr'] = 5.0")
    model, other, settings = check(ranks2, "model optimizer")[:2] + check(ranks2, "optimizer")[1:]
    assert model.startswith("model 0 ")
    assert other.endswith("differs in 1 of 6 parameters, first 1.bias: 1 element, by 1")
    assert settings.endswith("first param_groups[0]['lr']: float 5.0, on rank 0 float 0.001")


def test_a_check_needs_no_process_group(ranks2):
    assert ranks2.run(f"%%ddl --no-panel --strategy axonn:2x1x1\n{TRAIN}").ename is None
    ranks2.run("%%ddl\nimport torch.distributed as dist\ndist.destroy_process_group()")
    assert "sharded over ranks 0-1; the rest is equal" in check(ranks2, "model")[0]


def test_a_mistake_is_one_line_and_a_running_cell_is_not_disturbed(ranks2, tmp_path):
    ranks2.run("%%ddl\nlr = 0.1")
    assert ranks2.run("%ddl check").ename == "UsageError"
    assert "is not a name nor an expression" in ranks2.run("%ddl check x[").text
    ranks2.run("%%ddl --bg\n" + HOLD.format(path=str(tmp_path / "go")))
    shown = ranks2.run("%ddl check lr")
    assert shown.ename == "BusyError"
    assert len(shown.traceback.splitlines()) == 1
    (tmp_path / "go").touch()
    ranks2.run("%ddl wait")
    assert check(ranks2, "lr") == ["lr 0-1 float 0.1 equal"]
