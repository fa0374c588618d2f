"""`ddl.from_pretrained`: the model that plain transformers gives, and of it on each rank what its strategy wants."""

from __future__ import annotations

import pytest

from tests.strategies import ranks
from tests.strategies.pretrained_models import FAMILIES, save_all

ALL = ("single", "ddp", "zero:3", "fsdp", "axonn:2x1x1")
MORE = ("zero:2", "zero:3,offload_param=cpu", "fsdp,offload=cpu", "axonn:1x1x2")
RUNS = [(strategy, family) for strategy in ALL for family in FAMILIES] + [(more, "llama-tied") for more in MORE]
SHARES = {"zero:3": 0.5, "fsdp": 0.5, "axonn": 0.6}
"""Of all parameters, at most; the embeddings, which are an eighth of these small models, are whole under axonn."""

pytest.importorskip("deepspeed")
pytest.importorskip("axonn")
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
every_run = pytest.mark.parametrize(("strategy", "family"), RUNS, ids=[f"{one}-{two}" for one, two in RUNS])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks found in the folders of all families."""
    models = tmp_path_factory.mktemp("models")
    save_all(models)
    return ranks.start("pretrained_ranks.py", 2, tmp_path_factory.mktemp("pretrained"), str(models), timeout=220)


def of(found, strategy, family):
    findings = found.of(strategy)
    return [finding[family] for finding in (findings[:1] if strategy == "single" else findings)]


@every_run
def test_weights_and_logits_are_those_of_plain_transformers(found, strategy, family):
    for finding in of(found, strategy, family):
        assert finding["names"]
        assert finding["weights"], "whole weights, bit by bit, before prepare"
        assert finding["logits"] < 1e-5
        assert finding["evaluates"]
        assert finding["generation"] == 7


@every_run
def test_training_goes_on_as_with_plain_transformers(found, strategy, family):
    for finding in of(found, strategy, family):
        if "zero" in strategy and family != "llama-tied":
            assert "trained" not in finding, "not tried: an engine for each takes long"
        else:
            assert finding["trained"] < 1e-6
            assert finding["moved"] > 1e-2


@every_run
def test_a_rank_has_memory_for_its_share_alone(found, strategy, family):
    share = next((share for name, share in SHARES.items() if strategy.startswith(name)), 1.0)
    for finding in of(found, strategy, family):
        assert finding["share"] <= share + 0.01
        assert finding["share"] >= 0.5 if share < 1 else finding["share"] == 1


@pytest.mark.parametrize("strategy", ["ddp", "zero:3", "fsdp", "axonn:2x1x1"])
def test_the_dtype_is_the_cells_unless_it_is_given(found, strategy):
    wanted = {
        "32 None": ["float32", "float32"],
        "bf16-true None": ["bfloat16", "bfloat16"],
        "32 bfloat16": ["bfloat16", "bfloat16"],
        "bf16-true auto": ["float32", "bfloat16"],  # as it was saved; `prepare` puts it into the precision of the cell
    }
    for finding in found.of("dtypes"):
        for asked, (loaded, computes) in wanted.items():
            assert finding[f"{strategy} {asked}"] == [f"torch.{loaded}", 0.25, f"torch.{computes}"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no folder", "There is no folder"),
        ("no such name", "nobody/nothing is no folder here and cannot be had from the hub: "),
        ("setting", "has no setting 'attention_dropuot'. Did you mean 'attention_dropout'?"),
        ("dtype", "dtype='int8' cannot be. Valid: torch.float32, torch.bfloat16, ..., or 'auto'."),
        ("no causal model", "t5 is a t5, which is no causal language model"),
        ("missing", "1 missing in it (model.norm.weight); 1 unknown here (model.another.weight)"),
        ("shape", "lm_head.weight (64, 32), here (65, 32)"),
        ("on one rank", "There is no folder"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_line_on_every_rank(found, what, message):
    first, second = found.of("refused")
    for strategy in ("ddp", "fsdp"):
        assert message in first[strategy][what]
        assert first[strategy][what] == second[strategy][what]
        assert "\n" not in first[strategy][what]


@pytest.mark.parametrize("strategy", ["zero:3", "fsdp"])
def test_a_folder_without_safetensors_is_loaded_whole(found, strategy):
    for finding in found.of("whole"):
        assert finding[strategy]["logits"] < 1e-6
    assert "pickled is loaded whole on every rank: it has no safetensors files." in found.output


def test_rows_cannot_compute_before_prepare_and_say_so(found):
    for finding in found.of("unprepared"):
        assert finding["said"].startswith("This LlamaForCausalLM is sharded by fsdp, and no rank can compute")


def test_nothing_is_printed_but_notes_and_the_progress_of_a_whole_load(found):
    known = ("ddl: axonn:", "is loaded whole on every rank", "Loading weights:")
    assert [line for line in found.output.split("\n") if line.strip() and not any(part in line for part in known)] == []
    assert found.returncode == 0
