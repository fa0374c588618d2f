"""Five steps, a save, a load in other processes and five more steps are ten steps: any strategy and size to any."""

from __future__ import annotations

import pytest

from tests.checkpoint.training import Cells
from tests.strategies.ranks import start

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(900)]

STRATEGIES = ["ddp", "zero:1", "zero:2", "zero:3", "fsdp", "axonn:2x1x1"]
SAME = [f"{strategy}<2 {strategy} dropout" for strategy in STRATEGIES]
"""With dropout: the random numbers of each rank go on, too."""
LAUNCHES = [
    (2, [*(f"{s} dropout" for s in STRATEGIES), "ddp mlp", "fsdp mlp", "zero:3 llama-tied", "axonn:2x1x1 llama-tied"]),
    (4, ["axonn:2x2x1 mlp", "fsdp<2 ddp mlp", "ddp<2 fsdp mlp"]),
    (1, ["single mlp", "single<2 fsdp mlp", "single<4 axonn:2x2x1 mlp"]),
    (2, [*SAME, "axonn:2x1x1<2 zero:3 llama-tied", "zero:2<2 axonn:2x1x1 llama-tied", "zero:1<4 axonn:2x2x1 mlp",
         "zero:3<1 single mlp", "fsdp<2 zero:3 llama-tied"]),
]  # fmt: skip
"""Numbers of ranks, and what they do, one after the other; see `Cells.do`."""
LOADS = [task for _, tasks in LAUNCHES for task in tasks if "<" in task]


@pytest.fixture(scope="module")
def found(tmp_path_factory, rank):
    home = tmp_path_factory.mktemp("matrix")
    checkpoints = home / "checkpoints"
    checkpoints.mkdir()
    results = {}
    for number, (size, tasks) in enumerate(LAUNCHES):
        if size == 1:  # these very tests' process
            results |= {task: [Cells(rank).do(task, checkpoints)] for task in tasks}
            continue
        folder = home / str(number)
        folder.mkdir()
        done = start("../checkpoint/matrix_ranks.py", size, folder, str(checkpoints), *tasks, timeout=400)
        results |= {task: done.of(task) for task in tasks}
        assert done.returncode == 0, done.output[-3000:]
    return results


@pytest.mark.parametrize("task", LOADS)
def test_goes_on_as_if_nothing_had_happened(found, task):
    strategy, _, source = task.partition("<")
    _, saved_under, _ = source.split()
    limit = 1e-6 if strategy == saved_under else 1e-5
    for result in found[task]:
        assert result["losses"] < limit
        assert result["weights"] < limit
        assert result["moved"] > 1e-3
        assert (result["step"], result["rates"], result["best"]) == (5, True, True)
        assert result["points"] == [6, 7, 8, 9, 10]
