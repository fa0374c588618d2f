"""The training cell under each strategy against one process: same losses, same norms, same weights."""

from __future__ import annotations

import pytest

from tests.strategies import ranks

SPECS = {2: ("ddp", "zero:1", "zero:2", "zero:3", "fsdp"), 4: ("ddp", "zero:2", "zero:3", "fsdp")}
MODELS = {2: ("mlp", "llama-untied", "llama-tied", "opt"), 4: ("mlp", "llama-tied")}
WORLDS = [(size, spec) for size, specs in SPECS.items() for spec in specs]
RUNS = [(size, spec, model) for size, spec in WORLDS for model in MODELS[size]]

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]
worlds = pytest.mark.parametrize(("size", "spec"), WORLDS, ids=[f"{spec} on {size} ranks" for size, spec in WORLDS])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks of a world found; each world is started once."""
    findings = {}

    def start(size):
        if size not in findings:
            folder = tmp_path_factory.mktemp(f"parity{size}")
            models = ",".join(MODELS[size])
            findings[size] = ranks.start("parity_ranks.py", size, folder, models, *SPECS[size], timeout=280)
        return findings[size]

    return start


@pytest.mark.parametrize(("size", "spec", "model"), RUNS, ids=[f"{s} on {n} ranks-{model}" for n, s, model in RUNS])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_training_follows_one_process(found, size, spec, model, optimizer):
    (finding, *_) = found(size).of(f"{spec} {model} {optimizer}")  # losses are means over the ranks
    assert finding["losses"] < 1e-5
    assert finding["norms"] < 1e-5
    assert finding["moved"] > 1e-3, "nothing was learnt: the comparison says nothing"
    if optimizer == "sgd":  # AdamW turns rounding noise of zero gradients into steps
        assert finding["weights"] < 1e-5


@worlds
def test_bf16_mixed_trains(found, size, spec):
    for losses in found(size).of(f"{spec} bf16-mixed"):
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("size", SPECS)
def test_nothing_is_printed_beside_what_the_cell_prints(found, size):
    findings = found(size)
    assert findings.returncode == 0
    assert findings.output == ""
