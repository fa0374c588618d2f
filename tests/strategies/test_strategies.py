"""What single, ddp and zero promise about one model: same start, same optimizer, their share of memory, no leak."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

ALL = ("ddp", "zero:1", "zero:2", "zero:3", "fsdp")
SHARDED = ("zero:1", "zero:2", "zero:3")


@pytest.mark.parametrize("text", ["single", *ALL])
@pytest.mark.parametrize("size", [2, 4])
def test_memory_of_a_rank_is_what_theory_says(request, size, text):
    """Within 5 %, for parameters, gradients and optimizer state, measured while gradients accumulate."""
    findings = request.getfixturevalue("on_two_ranks" if size == 2 else "on_four_ranks")
    every_rank = findings.of("memory_shares")
    whole = every_rank[0]["equal layers"]["single"]["measured"]
    for rank, found in enumerate(every_rank[: 1 if text == "single" else size]):
        own = found["equal layers"][text]
        for kind, share in own["theory"].items():
            assert own["measured"][kind] == pytest.approx(share * whole[kind], rel=0.05), (rank, kind)


@pytest.mark.parametrize("text", ALL)
def test_the_peak_of_one_step_is_what_theory_says(on_two_ranks, text):
    """Also for stage 1, which has its share of the gradients alone once `backward` is over."""
    every_rank = on_two_ranks.of("memory_shares")
    whole = every_rank[0]["equal layers"]["single"]["measured"]
    for found in every_rank:
        own = found["equal layers"][text]
        for kind, share in own["theory"].items():
            assert own["peak"][kind] == pytest.approx(share * whole[kind], rel=0.05), kind


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("size", [2, 4])
def test_a_parameter_at_a_border_of_shards_costs_no_more_than_itself(request, size, text):
    """ZeRO 2 keeps the gradient of such a parameter whole on both sides; the rest stays what theory says."""
    findings = request.getfixturevalue("on_two_ranks" if size == 2 else "on_four_ranks")
    every_rank = findings.of("memory_shares")
    whole = every_rank[0]["a head"]["single"]["measured"]
    largest = 4 * 32 * 32
    for found in every_rank:
        own = found["a head"][text]
        excess = {kind: own["measured"][kind] - share * whole[kind] for kind, share in own["theory"].items()}
        assert -64 < excess["gradients"] <= (2 * largest if text in {"zero:1", "zero:2"} else 64)
        assert abs(excess["optimizer"]) <= 64
        assert -64 < excess["parameters"] <= (0.02 * whole["parameters"] if text == "zero:3" else 64)


def test_single_counts_every_byte_once(on_two_ranks):
    numel = 8 * (32 * 32 + 32)
    measured = on_two_ranks.of("memory_shares")[0]["equal layers"]["single"]["measured"]
    assert measured["parameters"] == 4 * numel
    assert measured["gradients"] == 4 * numel
    assert measured["optimizer"] == pytest.approx(8 * numel, rel=0.01)  # two moments; and a step counter each


@pytest.mark.parametrize("text", ALL)
def test_model_init_gives_the_weights_of_one_process(on_two_ranks, text):
    for found in on_two_ranks.of("model_init_gives_the_weights_of_one_process"):
        assert found[text]["before"] == found["one process"]
        assert found[text]["after"] == found["one process"]
        assert found[text]["tied"]
        assert found[text]["shapes"] == found["shapes"]  # by which programs choose what decays


@pytest.mark.parametrize("text", ALL)
def test_prepare_gives_every_rank_the_weights_of_rank_zero(on_two_ranks, text):
    first, second = (found[text] for found in on_two_ranks.of("prepare_gives_every_rank_the_weights_of_rank_zero"))
    assert second["own"] != first["own"]
    assert first["prepared"] == second["prepared"] == first["own"]


@pytest.mark.parametrize("precision", ["32", "bf16-true"])
@pytest.mark.parametrize("text", ["single", *ALL])
def test_whole_weights_go_in_and_come_out(on_two_ranks, text, precision):
    for found in on_two_ranks.of("whole_weights_go_in_and_come_out"):
        own = found[f"{text} {precision}"]
        assert own["before"] == found["given"]
        assert own["loaded"]
        assert own["dtype"] == {"32": "torch.float32", "bf16-true": "torch.bfloat16"}[precision]
        assert "missing (model.embed_tokens.weight" in own["missing"]
        assert "model.norm.weight (3,) for (32,)" in own["misshaped"]
        assert "1 unexpected (other)" in own["unexpected"]


@pytest.mark.parametrize("text", ALL)
def test_the_users_optimizer_drives_the_step(on_two_ranks, text):
    for found in on_two_ranks.of("the_users_optimizer_drives_the_step"):
        first, *later = found[text]["digests"]
        assert found[text]["same optimizer"]
        assert first != later[0]
        assert len(set(later)) == 1, "the schedule set the learning rate to 0"
        wanted = on_two_ranks.ranks[0]["the_users_optimizer_drives_the_step"]["single"]["weights"]
        assert found[text]["weights"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("text", ["single", *ALL])
def test_low_precision_trains(on_two_ranks, text, precision):
    for rank, found in enumerate(on_two_ranks.of("low_precision_trains")):
        if text == "single" and rank > 0:
            continue
        own = found[f"{text} {precision}"]
        assert own["losses"][-1] < 0.5 * own["losses"][0]
        assert own["dtype"] == {"bf16-mixed": "torch.float32", "bf16-true": "torch.bfloat16"}[precision]


@pytest.mark.parametrize("text", ALL)
def test_two_models_train_side_by_side_as_each_alone(on_two_ranks, text):
    for found in on_two_ranks.of("two_models_train_side_by_side"):
        assert found[text] == found[f"{text} alone"]


@pytest.mark.parametrize("text", ALL)
def test_a_model_is_prepared_once_until_it_is_closed(on_two_ranks, text):
    for found in on_two_ranks.of("a_second_prepare"):
        assert found[text]["refused"].startswith(f"This MLP is prepared already, under {text}.")
        losses = found[text]["losses"]
        assert losses == sorted(losses, reverse=True), "after close, a second prepare goes on where the first ended"
        assert found[text]["held"] == found[text]["of"], "close gives the optimizer its parameters back"


@pytest.mark.parametrize("text", ["zero:3", "fsdp"])
def test_a_sharded_model_is_refused_by_other_strategies(on_two_ranks, text):
    for found in on_two_ranks.of("a_second_prepare"):
        assert f"sharded by {text}" in found[f"{text} foreign"]


@pytest.mark.parametrize("text", SHARDED)
def test_optimizers_that_shards_would_mislead_are_refused(on_two_ranks, text):
    for found in on_two_ranks.of("optimizers_that_shards_would_mislead"):
        by_matrix, stepped, frozen = found[text]
        assert "Adafactor looks at a weight as a matrix" in by_matrix
        assert "This SGD holds state already" in stepped
        assert "Group 1 of this SGD holds only frozen parameters" in frozen


def test_fsdp_refuses_optimizers_that_rows_would_mislead(on_two_ranks):
    for found in on_two_ranks.of("optimizers_that_shards_would_mislead"):
        assert "Adafactor looks at a weight as a matrix" in found["fsdp"][0]


@pytest.mark.parametrize("text", ALL)
def test_evaluation_needs_no_optimizer(on_two_ranks, text):
    for found in on_two_ranks.of("evaluation_without_an_optimizer"):
        assert found[text]["loss"] == pytest.approx(found["single"]["loss"], rel=1e-6)
        assert "step needs an optimizer" in found[text]["step"]


@pytest.mark.parametrize(
    "text", ["zero:1,offload=cpu", "zero:2,offload=cpu", "zero:3,offload=cpu,offload_param=cpu", "fsdp,offload=cpu"]
)
def test_offload_trains_as_without(on_two_ranks, text):
    for found in on_two_ranks.of("offload_trains_as_without"):
        assert found[text]["losses"] == pytest.approx(found["zero:2"]["losses"], rel=1e-5)
        assert found[text]["norm"] == pytest.approx(found["zero:2"]["norm"], rel=1e-5)


def test_parameters_that_take_no_part_are_left_alone(on_two_ranks):
    for found in on_two_ranks.of("parameters_that_take_no_part"):
        assert found["extra unchanged"]
        assert len(found["losses"]) == 4


@pytest.mark.parametrize("text", ALL)
def test_memory_can_be_read_from_another_thread(on_two_ranks, text):
    for found in on_two_ranks.of("memory_is_read_from_another_thread"):
        assert found[text]["raised"] == []
        assert found[text]["read"] > 10
        assert found[text]["as the last look"]


@pytest.mark.parametrize("kind", ["python threads", "threads", "groups", "modules", "tensors", "tensor bytes"])
def test_strategies_follow_one_another_without_a_leak(on_two_ranks, kind):
    for found in on_two_ranks.of("strategies_follow_one_another_without_a_leak"):
        counts = [count[kind] for count in found["rounds"]]
        assert counts[1] == counts[-1], counts


def test_resident_memory_settles(on_two_ranks):
    """Ten models of 1 MB with their optimizers come and go between the two measurements."""
    for found in on_two_ranks.of("strategies_follow_one_another_without_a_leak"):
        resident = [count["resident"] for count in found["rounds"]]
        assert resident[-1] - resident[2] < 8 * 2**20, resident


def test_zero_3_puts_torchs_linear_back(on_two_ranks):
    for found in on_two_ranks.of("strategies_follow_one_another_without_a_leak"):
        assert found["linear is torch's"]


@pytest.mark.parametrize("text", ALL)
def test_strategies_train_in_a_group_made_anew(on_two_ranks, text):
    for found in on_two_ranks.of("a_group_made_anew"):
        assert found[text] == pytest.approx(found["ddp"], rel=1e-5)


def test_libraries_print_nothing(on_two_ranks):
    assert on_two_ranks.returncode == 0
    assert on_two_ranks.output == ""
