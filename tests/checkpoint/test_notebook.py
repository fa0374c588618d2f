"""Checkpoints in a notebook: from one cell to another strategy's, errors in one line, ranks that do not come."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]

BUILD = """%%ddl --strategy {strategy} --seed {seed}
with ddl.model_init():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(inputs, batch_size=4, shuffle=True)
model, optimizer, loader = ddl.prepare(model, optimizer, loader)
"""
TRAIN = """
losses = []
for x in ddl.track(loader, epochs=2):
    losses.append(ddl.all_reduce_mean((loss := model(x).pow(2).mean()).detach()))
    ddl.backward(loss)
    ddl.step()
    if len(losses) == {many}:
        break
"""
SHOW = "ddl.print('losses', *(f'{loss:.6f}' for loss in losses))\n"


@pytest.fixture(scope="module")
def ready(ranks2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    shown = ranks2.run(
        "%%ddl\nimport torch\nfrom torch.utils.data import DataLoader\n"
        f"run = {str(folder)!r}\ninputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))"
    )
    assert shown.ename is None, shown.text
    return ranks2


def losses_of(shown):
    assert shown.ename is None, shown.text
    return shown.text.partition("losses ")[2].splitlines()[0].split()


def test_a_later_cell_goes_on_under_another_strategy_with_its_curve(ready):
    whole = losses_of(ready.run(BUILD.format(strategy="ddp", seed=1) + TRAIN.format(many=99) + SHOW))
    saved = ready.run(BUILD.format(strategy="ddp", seed=1) + TRAIN.format(many=8) + "print(ddl.save(run, best=1.5))")
    assert saved.ename is None, saved.text
    assert "run0/step-8" in saved.text
    assert "Checkpoints go to" in saved.text
    shown = ready.run(
        BUILD.format(strategy="zero:3", seed=2)
        + "print(ddl.load(run, resume='latest').extra)\n"
        + TRAIN.format(many=99)
        + SHOW,
    )
    assert losses_of(shown) == whole[8:]
    assert "{'best': 1.5}" in shown.text
    assert "12/12" in shown.text or "12 of 12" in shown.text, shown.text


def test_what_does_not_fit_is_one_line_for_all_ranks(ready):
    shown = ready.run("%%ddl\nother = ddl.prepare(torch.nn.Linear(3, 1))\nddl.load(run, other)")
    assert shown.ename == "CellError"
    assert "is of another model than this Linear: 2 missing in it (weight, bias); 4 unknown here" in shown.text
    assert "Traceback" not in shown.text
    assert "ranks 0-1 failed" in shown.evalue


def test_a_save_that_only_one_rank_calls_is_told_before_and_ends_by_itself(ready):
    strict = ready.run("%%ddl --strict\nif rank == 0:\n    ddl.save(run, model)")
    assert "line 3: ddl.save is reached only where rank == 0" in strict.text
    assert strict.ename == "UsageError"
    shown = ready.run("%%ddl\nif rank == 0:\n    ddl.save(run, model)", timeout=30)
    assert shown.ename == "CellError"
    assert "in ddl.save" in shown.evalue, shown.text
    assert "rank 1 ended the cell without it" in shown.evalue
    assert 10 <= shown.seconds < 20
    after = ready.run("%%ddl\nprint(ddl.save(run, model, keep=1))\nimport os\nddl.print(sorted(os.listdir(run)))")
    assert after.ename is None, after.text
    assert "['latest', 'step-12']" in after.text
