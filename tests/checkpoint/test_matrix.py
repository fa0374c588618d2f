"""Five steps, a save, a load in other processes and five more steps are ten steps: any strategy and size to any."""

from __future__ import annotations

import pytest

from tests.strategies.ranks import start

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

STRATEGIES = ["ddp", "zero:1", "zero:2", "zero:3", "fsdp", "axonn:2x1x1"]
ACROSS = ["ddp", "zero:3", "fsdp", "axonn:2x1x1"]
SAME = [f"{strategy}<2 {strategy} dropout" for strategy in STRATEGIES]
"""With dropout: the random numbers of each rank go on, too."""
LAUNCHES = [
    (2, [*(f"{s} dropout" for s in STRATEGIES), *(f"{s} llama-tied" for s in ACROSS)]),
    (4, ["axonn:2x2x1 llama-tied", "zero:3<2 ddp llama-tied", "fsdp<2 axonn:2x1x1 llama-tied"]),
    (1, ["single opt", "single<4 axonn:2x2x1 llama-tied", "single<2 fsdp llama-tied", "single<1 single opt"]),
    (2, [*SAME, "fsdp<2 zero:3 llama-tied", "axonn:2x1x1<2 fsdp llama-tied", "zero:2<2 axonn:2x1x1 llama-tied",
         "zero:1<2 ddp llama-tied", "zero:3<1 single opt"]),
]  # fmt: skip
"""Numbers of ranks, and what they do, one after the other; see `matrix_ranks.py`."""
LOADS = [task for _, tasks in LAUNCHES for task in tasks if "<" in task]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    home = tmp_path_factory.mktemp("matrix")
    (home / "checkpoints").mkdir()
    results = {}
    for number, (size, tasks) in enumerate(LAUNCHES):
        folder = home / str(number)
        folder.mkdir()
        done = start("../checkpoint/matrix_ranks.py", size, folder, str(home / "checkpoints"), *tasks, timeout=250)
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
