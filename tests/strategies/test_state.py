"""What checkpoints ask of a strategy: any state into any strategy, and training goes on as if nothing had been.

The ranks train a few steps, gather the state, put it into another model, and train on; see `state_ranks.py`.
"""

from __future__ import annotations

import pytest

from tests.strategies import ranks

pytest.importorskip("deepspeed")
pytest.importorskip("axonn")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(400)]

EXACT, CLOSE = 1e-6, 1e-5
"""Relative difference to training without interruption, under the same strategy and under another."""

UNUSED = "ddp,find_unused_parameters=true"
TWO = (
    "single", UNUSED, "zero:1", "zero:2", "zero:3", "zero:2,offload=cpu", "fsdp", "axonn:2x1x1", "axonn:1x2x1",
    "axonn:1x1x2",
)  # fmt: skip
GRIDS = ("4x1x1", "1x4x1", "1x1x4", "2x2x1", "2x1x2", "1x2x2", "2x1x1", "1x2x1", "1x1x2")
FOUR = tuple(f"axonn:{grid}" for grid in GRIDS)
WORLDS = [(2, text) for text in TWO] + [(4, text) for text in FOUR]
worlds = pytest.mark.parametrize(("size", "text"), WORLDS, ids=[f"{text} on {size} ranks" for size, text in WORLDS])
strategies = pytest.mark.parametrize("text", TWO)

STATE_OF = {
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "amsgrad": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "fused": {"step", "exp_avg", "exp_avg_sq"},
    "adam": {"step", "exp_avg", "exp_avg_sq"},
    "momentum": {"momentum_buffer"},
    "sgd": set(),
    "rmsprop": {"step", "square_avg", "grad_avg", "momentum_buffer"},
    "nadam": {"step", "exp_avg", "exp_avg_sq", "mu_product"},
    "adagrad": {"step", "sum"},
    "adafactor": {"step", "row_var", "col_var", "variance"},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks of a world found; each world is started once."""
    findings = {}

    def start(size):
        if size not in findings:
            folder = tmp_path_factory.mktemp(f"state{size}")
            checks = () if size == 2 else ("any_to_any",)
            findings[size] = ranks.start("state_ranks.py", size, folder, *checks, timeout=380)
        return findings[size]

    return start


@worlds
def test_state_of_any_strategy_goes_into_it_bit_by_bit(found, size, text):
    for finding in found(size).of("any_to_any"):
        sources = finding["pairs"][text]
        assert len(sources) == (len(TWO) if size == 2 else len(FOUR))
        assert {source: pair["unlike"] for source, pair in sources.items()} == {source: [] for source in sources}


@worlds
def test_training_goes_on_as_without_interruption(found, size, text):
    for finding in found(size).of("any_to_any"):
        trained = {source: pair for source, pair in finding["pairs"][text].items() if "losses" in pair}
        assert len(trained) == (len(TWO) if size == 2 else 2)
        for source, pair in trained.items():
            limit = EXACT if source == text else CLOSE
            assert pair["losses"] < limit, source
            assert pair["weights"] < limit, source
            assert pair["steps"] == 6, "the count of steps goes on"


@worlds
def test_gathered_weights_are_those_of_the_full_state_dict(found, size, text):
    for finding in found(size).of("any_to_any"):
        assert finding["unlike"][text] == []


@strategies
def test_a_checkpoint_consists_of_the_same_whatever_the_strategy(found, text):
    for finding in found(2).of("any_to_any"):
        one_process, names = finding["names"]["single"], finding["names"][text]
        assert len(set(names)) == len(names)
        assert not [name for name in names if "head.weight" in name], "it is tied to the embedding"
        assert "norm.weight/weight" in names, "frozen weights are weights"
        assert "norm.weight/exp_avg" not in names
        assert "loose/exp_avg" not in names, "no optimizer has it"
        assert "spare/exp_avg" not in one_process, "it was never used"
        # ZeRO keeps its state in one flat tensor with that of the others.
        flat = {f"spare/{kind}" for kind in STATE_OF["adamw"]} if text.startswith("zero") else set()
        assert set(names) - set(one_process) == flat
        assert set(one_process) <= set(names)


@pytest.mark.parametrize("model", ["llama-tied", "mlp"])
def test_models_of_the_tutorial_go_on_as_without_interruption(found, model):
    for finding in found(2).of("other_models"):
        assert finding[model]
        for text, sources in finding[model].items():
            for source, pair in sources.items():
                assert pair["unlike"] == []
                assert pair["losses"] < (EXACT if source == text else CLOSE), (source, text)
                assert pair["weights"] < (EXACT if source == text else CLOSE), (source, text)


@pytest.mark.parametrize("optimizer", STATE_OF)
def test_any_optimizer_goes_from_strategy_to_strategy(found, optimizer):
    for finding in found(2).of("other_optimizers"):
        chain = finding[optimizer]
        assert chain["losses"] < CLOSE
        assert chain["weights"] < CLOSE
        # What is never used keeps its count outside ZeRO, which counts all together.
        assert [name for name in chain["unlike"] if not name.startswith("spare/")] == []
        for text, kinds in chain["kinds"].items():
            assert set(kinds) - {"weight"} == STATE_OF[optimizer], text


PRECISIONS = [
    ("zero:2 bf16-mixed", "float32", "float32", False),
    (f"{UNUSED} bf16-true", "bfloat16", "bfloat16", False),
    ("zero:1 bf16-true", "bfloat16", "float32", True),
    ("zero:3 bf16-true", "bfloat16", "float32", True),
    ("zero:2,offload=cpu bf16-true", "bfloat16", "float32", True),
    ("axonn:2x1x1 bf16-true", "bfloat16", "bfloat16", False),
    ("fsdp bf16-true", "bfloat16", "bfloat16", False),
]


@pytest.mark.parametrize(("run", "weight", "state", "master"), PRECISIONS, ids=[run for run, *_ in PRECISIONS])
def test_low_precision_goes_on_bit_by_bit(found, run, weight, state, master):
    for finding in found(2).of("precisions"):
        assert finding[run]["unlike"] == []
        assert finding[run]["same losses"]
        dtypes = finding[run]["dtypes"]
        assert (dtypes["weight"], dtypes["exp_avg"]) == (f"torch.{weight}", f"torch.{state}")
        assert dtypes.get("master") == ("torch.float32" if master else None)


def test_masters_go_where_there_are_masters_and_are_the_weights_elsewhere(found):
    for finding in found(2).of("masters"):
        taken = finding["taken from the weights"]
        assert len(taken) == 10
        assert all(taken)
        runs = {run: told for run, told in finding.items() if isinstance(told, dict)}
        assert len(runs) == 4
        for run, told in runs.items():
            assert told["unlike"] == [], run
            assert told["masters"] == (10 if run == "zero:3 bf16-true" else 0)


@pytest.mark.parametrize("text", ["single", UNUSED, "fsdp", "zero:1", "zero:3", "axonn:2x1x1"])
def test_a_checkpoint_in_fp32_goes_on_in_bf16(found, text):
    """State in the dtype of the weights, as torch's load_state_dict makes it; masters from the exact weights."""
    for finding in found(2).of("other_precision"):
        told = finding[text]
        has_masters = text.startswith("zero")
        assert told["dtypes"]["weight"] == "torch.bfloat16"
        assert told["dtypes"]["exp_avg"] == ("torch.float32" if has_masters else "torch.bfloat16")
        assert told["dtypes"]["step"] == "torch.float32"
        assert told["masters"] == [True] * (10 if has_masters else 0)
        assert told["losses"] == pytest.approx(finding["single"]["losses"], rel=2e-2)


@strategies
def test_state_from_before_the_first_step_begins_training_anew(found, text):
    for finding in found(2).of("before_the_first_step"):
        assert finding[text] == {"kinds": ["weight"], "same": True, "same losses": True}


@strategies
def test_a_model_with_frozen_parameters_trains_as_in_one_process(found, text):
    for finding in found(2).of("mostly_frozen"):
        one_process, told = finding["single"], finding[text]
        assert told["losses"] == pytest.approx(one_process["losses"], rel=CLOSE)
        assert max(one_process["losses"]) - min(one_process["losses"]) > 1e-2
        assert told["states"] == one_process["states"], "only what is trained has a state"
        assert {name.split(".")[0] for name in told["states"]} == {"up", "down"}
        assert told["weights"] == one_process["weights"]
        assert told["again"] == pytest.approx(told["losses"][3:], rel=EXACT)


@pytest.mark.parametrize("text", ["zero:3", "fsdp", "axonn:2x1x1", "axonn:1x2x1", "axonn:1x1x2"])
def test_a_rank_reads_only_its_share_where_parameters_are_split(found, text):
    for finding in found(2).of("what_is_read"):
        assert finding[text]["read"] < 0.53 * finding[text]["all"]
        assert finding[UNUSED]["read"] == finding[UNUSED]["all"]


@pytest.mark.parametrize("text", ["zero:1", "zero:2", "zero:2,offload=cpu"])
def test_a_rank_reads_only_its_share_of_the_optimizer_where_that_is_split(found, text):
    for finding in found(2).of("what_is_read"):
        weights, state = finding[text]["all"] / 3, finding[text]["all"] * 2 / 3
        assert finding[text]["read"] < weights + 0.53 * state


def test_zero_says_where_counts_of_steps_become_one(found):
    for finding in found(2).of("counts_that_differ"):
        for text in ("zero:1", "zero:3"):
            (note,) = finding[text]["notes"]
            assert "1 that were updated less often than the others are now at step 4" in note
            assert finding[text]["steps"] == [4.0]
        assert finding["axonn:2x1x1"] == {"notes": [], "steps": [2.0, 4.0]}


@pytest.mark.parametrize("text", ["zero:1", "zero:2,offload=cpu", "zero:3"])
def test_deepspeeds_own_functions_see_what_was_put(found, text):
    for finding in found(2).of("deepspeed_sees_the_same"):
        assert finding[text] == {"weight": True, "state": True, "counters": [2, 2, 4, 0]}


@pytest.mark.parametrize("text", ["ddp", "zero:2", "zero:3", "fsdp", "axonn:2x1x1"])
def test_buffers_are_rank_zeros(found, text):
    first, second = found(2).of("buffers_of_rank_zero")
    assert first[text] is None
    assert second[text] == [1.0] * 4


def test_what_no_checkpoint_can_hold_is_refused(found):
    for finding in found(2).of("refusals"):
        for text in ("ddp", "zero:1", "zero:3"):
            assert "2 parameters that are not those of this MLP" in finding[text]
        assert "LBFGS keeps a list as 'old_dirs'" in finding["lists"]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_end_well(found, size):
    findings = found(size)
    assert findings.returncode == 0, findings.output
