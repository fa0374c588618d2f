"""The options of training under every strategy, beside the same cell in one process: what they change, and what not."""

from __future__ import annotations

import pytest

from tests.strategies import ranks

SPECS = ("ddp", "zero:2", "zero:3", "fsdp", "axonn:2x1x1")
NOT_COMPILED = ("zero:3", "axonn:2x1x1")

for package in ("axonn", "deepspeed", "peft", "transformers"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]
every = pytest.mark.parametrize("spec", SPECS)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks found; one start for all tests of this file."""
    return ranks.start("options_ranks.py", 2, tmp_path_factory.mktemp("options"), *SPECS, timeout=280)


@pytest.fixture
def one(found):
    """What one process got."""
    return found.of("single")[0]


def furthest(got, expected):
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))


@every
def test_accumulation_schedule_and_checkpointed_activations_follow_one_process_without_them(found, one, spec):
    expected = one["several options"]
    for own in found.of(f"{spec} several options"):
        assert furthest(own["losses"], expected["losses"]) < 1e-6
        assert furthest(own["norms"], expected["norms"]) < 1e-5
        assert own["rates"] == expected["rates"]
    assert expected["rates"] == [1e-3, 1e-3, 2e-3, 2e-3, 2e-3, 2e-3]  # a step is two batches


def test_checkpointed_activations_lose_no_gradient_that_axonn_adds_later(found, one):
    """With `overlap=1` AxoNN adds it to the tensor that was saved, which is another when that was computed again."""
    for own in found.of("overlapped several options"):
        assert furthest(own["losses"], one["several options"]["losses"]) < 1e-6
        assert furthest(own["norms"], one["several options"]["norms"]) < 1e-5


@every
def test_checkpointed_activations_keep_a_fraction(found, one, spec):
    """Two layers of a small model: their inputs, the logits and the loss are left."""
    for own in found.of(f"{spec} several options"):
        assert own["kept"] < 0.25 * one["several options"]["kept"] / 2  # half of the batch on each of two ranks


@every
def test_a_cell_ends_after_its_number_of_optimizer_steps_on_all_ranks(found, spec):
    for own in found.of(f"{spec} several options"):
        assert len(own["losses"]) == 6, "three steps of two batches, and none in the second loop"
        assert own["progress"] == [3, 3]
        assert own["tokens a second"] > 0


@every
def test_the_gradients_norm_goes_to_the_panel(found, spec):
    for own in found.of(f"{spec} several options"):
        assert len(own["norms"]) == 3
        assert own["recorded"] == pytest.approx(own["norms"], rel=1e-6)


@every
@pytest.mark.parametrize("bits", ["bf16-mixed", "bf16-true"])
def test_low_precision_stays_near_single_precision(found, one, spec, bits):
    for own in found.of(f"{spec} {bits}"):
        assert furthest(own["losses"], one["32"]["losses"]) < 0.01
        assert own["losses"] != one["32"]["losses"]
        assert own["dtype"] == {"bf16-mixed": "torch.float32", "bf16-true": "torch.bfloat16"}[bits]


@every
@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_a_compiled_model_trains_as_it_is_and_compiled_where_that_works(found, one, spec, how):
    for own in found.of(f"{spec} {how}"):
        assert furthest(own["losses"], one["compiled"]["losses"]) < 1e-6
        assert own["names"] == one["compiled"]["names"], "names of the model, without a wrapper's"
        assert own["class"] == "MLP"
        assert (own["graphs"] == 0) == (spec in NOT_COMPILED)
        assert len(own["notes"]) == (spec in NOT_COMPILED)
        assert all(note.startswith(f"{spec} does not compile this MLP: ") for note in own["notes"])


def test_a_compiled_model_trains_compiled_in_one_process(one):
    assert one["compiled torch.compile"]["graphs"] == 1
    assert furthest(one["compiled torch.compile"]["losses"], one["compiled"]["losses"]) < 1e-6


@every
def test_an_adapter_trains_as_in_one_process_and_alone(found, one, spec):
    for own in found.of(f"{spec} adapter"):
        assert furthest(own["losses"], one["adapter"]["losses"]) < 1e-5
        assert furthest(own["norms"], one["adapter"]["norms"]) < 1e-5
        assert own["evaluated"] == pytest.approx(one["adapter"]["evaluated"], rel=1e-5)
        assert not own["frozen moved"]
        assert not own["adapter stood still"]


@every
def test_tokens_weigh_the_means_of_unequal_shards(found, one, spec):
    (own, *_) = found.of(f"{spec} adapter")
    assert furthest(own["unweighted"], one["adapter"]["losses"]) > 5e-4, "the shards are equal: nothing is shown"
    assert furthest(own["losses"], one["adapter"]["losses"]) < 1e-5


@every
def test_plain_peft_reads_a_saved_adapter(found, spec):
    (own, *_) = found.of(f"{spec} adapter")
    assert own["read"] == []
    assert found.of("config")[0]["r"] == 4


@every
def test_an_adapter_of_another_shape_is_refused_in_one_line(found, spec):
    for own in found.of(f"{spec} adapter"):
        nowhere, wider = own["refused"]
        assert nowhere == "There is no adapter in /nowhere. Give the folder that ddl.save_adapter returned."
        assert "lora_A.weight has the shape (8, 32), here (4, 32), and" in wider


def test_the_ranks_end_well(found):
    assert found.returncode == 0, found.output[-4000:]
