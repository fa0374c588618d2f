"""Loops that end after a number of optimizer steps, of their own or of the cell; on one rank, under `single`."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from ddl_magics.errors import DDLError
from tests.one_rank import begin, one_rank


@pytest.fixture(scope="module")
def rank():
    return one_rank()


@pytest.fixture
def cell(rank):
    """Begins a cell with options, and gives its context."""

    def begun(**options):
        begin(rank, **options)
        return rank

    yield begun
    rank.end_cell()
    rank.forget_dropped_models()


def prepared(ddl, batches=10, **options):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(2 * batches, 2), batch_size=2)
    return ddl.prepare(model, optimizer, loader, **options)


def train(ddl, model, loader, **options):
    """Train in one loop; how many batches it had."""
    count = 0
    for batch in ddl.track(loader, **options):
        ddl.backward(model(batch).square().mean(), model=model)
        ddl.step(model=model)
        count += 1
    return count


def progress(ddl):
    shown = ddl.recorder.drain(final=True)["progress"]
    return shown.step, shown.total


def test_a_loop_ends_after_its_steps(cell):
    ddl = cell()
    model, _, loader = prepared(ddl)
    assert train(ddl, model, loader, steps=4) == 4
    assert progress(ddl) == (4, 4)
    assert train(ddl, model, loader, steps=4) == 4, "each loop has its own"


def test_steps_are_of_the_optimizer_and_go_through_epochs(cell):
    ddl = cell()
    model, _, loader = prepared(ddl, batches=5, accumulate=2)  # 3 steps an epoch
    assert train(ddl, model, loader, epochs=3, steps=4) == 7
    assert progress(ddl) == (4, 4)


def test_a_loop_that_is_shorter_ends_as_it_would(cell):
    ddl = cell()
    model, _, loader = prepared(ddl, batches=3)
    assert train(ddl, model, loader, steps=50) == 3
    assert progress(ddl) == (3, 3)


def test_the_cells_steps_end_its_loops_all_together(cell):
    ddl = cell(steps=7)
    model, _, loader = prepared(ddl, batches=5)
    assert [train(ddl, model, loader) for _ in range(3)] == [5, 2, 0]
    assert progress(ddl) == (2, 2)


def test_the_smaller_number_counts(cell):
    ddl = cell(steps=3)
    model, _, loader = prepared(ddl)
    assert train(ddl, model, loader, steps=5) == 3
    ddl = cell(steps=5)
    model, _, loader = prepared(ddl)
    assert train(ddl, model, loader, steps=3) == 3


def test_a_loop_without_steps_runs_to_its_end(cell):
    ddl = cell(steps=2)
    model, _, loader = prepared(ddl)
    assert train(ddl, model, loader) == 2
    assert len(list(ddl.track(range(6)))) == 6
    assert progress(ddl) == (6, 6)


def test_an_evaluation_inside_the_loop_ends_nothing(cell):
    ddl = cell(steps=3)
    model, _, loader = prepared(ddl)
    seen = []
    for batch in ddl.track(loader):
        ddl.backward(model(batch).square().mean())
        seen.append(len(list(ddl.track(range(4)))))
        ddl.step()
    assert seen == [4, 4, 4]


def test_each_model_of_a_cell_makes_its_steps(cell):
    ddl = cell(steps=3)
    counts = []
    for _ in range(2):
        model, _, loader = prepared(ddl)
        counts.append(train(ddl, model, loader))
    assert counts == [3, 3]


def test_two_models_over_one_list_make_their_steps_too(cell):
    ddl = cell(steps=3)
    data = [torch.randn(2, 2) for _ in range(8)]
    counts = []
    for _ in range(2):
        model, *_ = prepared(ddl)
        counts.append(train(ddl, model, data))
    assert counts == [3, 3]


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_no_number_of_steps_is_told_in_one_line(cell, steps):
    ddl = cell()
    with pytest.raises(DDLError, match="Give a whole number of optimizer steps"):
        next(ddl.track([1], steps=steps))


def test_the_norm_of_each_step_is_recorded_beside_the_loss(cell):
    ddl = cell()
    model, _, loader = prepared(ddl, batches=4, accumulate=2)
    norms = []
    for batch in ddl.track(loader):
        ddl.backward(model(batch).square().mean())
        norms.append(ddl.step(max_norm=0.5))
    points = [point for point in ddl.recorder.drain(final=True)["points"] if point.name == "grad norm"]
    assert [(point.step, point.value) for point in points] == [(2, float(norms[1])), (4, float(norms[3]))]


def test_without_clipping_no_norm_is_recorded(cell):
    ddl = cell()
    model, _, loader = prepared(ddl)
    train(ddl, model, loader)
    assert {point.name for point in ddl.recorder.drain(final=True)["points"]} == {"loss"}


def test_norms_of_several_models_have_names_of_their_own(cell):
    ddl = cell()
    models = [prepared(ddl)[0] for _ in range(2)]
    for model in models:
        ddl.backward(model(torch.ones(2, 2)).square().mean(), model=model)
        ddl.step(max_norm=1.0, model=model)
    names = {point.name for point in ddl.recorder.drain(final=True)["points"]}
    assert names == {"loss", "loss 2", "grad norm", "grad norm 2"}
