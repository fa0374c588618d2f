"""What the context promises about ranks together, measured on two ranks (context_ranks.py)."""

from __future__ import annotations

import pytest

from tests.strategies.ranks import start

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return start("../rank/context_ranks.py", 2, tmp_path_factory.mktemp("ranks"), timeout=220)


@pytest.mark.parametrize("case", ["plain", "accumulate", "ones"])
def test_losses_and_weights_are_those_of_one_process(found, case):
    """Also where the last batch does not divide, and where a rank has no sample of it."""
    first, second = (rank[case] for rank in found.of("losses_and_weights"))
    assert first["ddp"]["losses"] == pytest.approx(first["single"]["losses"], rel=1e-5)
    for got, wanted in zip(first["ddp"]["weights"], first["single"]["weights"], strict=True):
        assert flat(got) == pytest.approx(flat(wanted), abs=1e-6)
    assert second["ddp"] == first["ddp"]


def flat(nested):
    return [number for item in nested for number in flat(item)] if isinstance(nested, list) else [nested]


def test_step_acts_on_every_kth_call_and_at_the_end_of_an_epoch(found):
    assert found.of("losses_and_weights")[0]["accumulate"]["ddp"]["acted"] == 2 * [False, False, True, False, True]


def test_weights_make_means_of_unequal_shards_right(found):
    assert found.of("token_weights") == [[2.5], [2.5]]


def test_unequal_streams_end_together_with_a_note(found):
    for rank in found.of("unequal_streams_end_together"):
        assert rank["batches"] == 2
        assert rank["notes"][-1].startswith("The ranks have different numbers of batches")
    for rank in found.of("equal_streams_end_quietly"):
        assert rank["batches"] == 4
        assert len(rank["notes"]) == 1


def test_metrics_have_no_sample_twice(found):
    assert found.of("metrics_have_no_sample_twice") == 2 * [{"seen": list(range(11)), "scalars": [0.0, 1.0]}]


def test_gather_takes_ragged_tensors_and_any_object(found):
    wanted = {
        "tensors": [[[0, 1]], [[0, 1, 2]]],
        "objects": [{"rank": 0}, {"rank": 1}],
        "mean": 0.5,
        "mean_of_tensor": [0.5, 1.0],
    }
    assert found.of("words_between_ranks") == [wanted, wanted]


def test_first_lets_rank_zero_through_before_the_others(found):
    for rank in found.of("first_goes_first"):
        assert rank["waited"]
        assert rank["local"][0] < rank["local"][1]


def test_first_that_fails_frees_the_others_with_its_cause(found):
    first, other = found.of("first_that_fails_frees_the_others")
    assert first.startswith("FileNotFoundError: ")
    assert other.startswith(f"UsageOnRankError: The rank that went first failed: {first}.")


def test_print_prints_once(found):
    found.of("printing_is_rank_zero_s")
    assert "printed by rank 0" in found.output
    assert "printed by rank 1" not in found.output


def test_a_second_init_is_a_noted_no_op(found):
    for rank in found.of("second_init_is_a_noted_no_op"):
        assert rank["same"]
        assert rank["notes"] == ["init_process_group: the process group is open already, world size 2, and is used."]


def test_an_init_of_another_size_is_one_line(found):
    for text in found.of("init_of_another_size_is_one_line"):
        assert text.startswith("init_process_group asks for 4 ranks, and this process is one of 2.")


def test_a_program_can_destroy_and_init_again(found):
    assert found.of("program_can_destroy_and_init_again") == [[2.0] * 3] * 2
    assert found.of("torch_s_own_init_finds_a_store") == [2.0, 2.0]


def test_a_group_that_a_cell_destroyed_comes_back_for_the_next(found):
    for rank in found.of("group_that_a_cell_destroyed_comes_back"):
        assert rank["mean"] == 0.5
        assert rank["went on"]
        assert rank["losses"] == pytest.approx(found.of("losses_and_weights")[0]["plain"]["ddp"]["losses"])


def test_a_cell_of_one_process_neither_hangs_nor_harms_the_others_group(found):
    first, other = found.of("world_of_one")
    assert first["inside"] == [0, 1, "1", 1]
    assert first["destroyed"]
    assert first["again"] == 1
    assert first["world"] == other["world"] == [2, "2"]
    assert first["after"] == other["after"] == 4.0


def test_groups_threads_and_models_do_not_leak(found):
    for rank in found.of("nothing_leaks"):
        assert rank["after"] == rank["before"]


def test_the_environment_says_what_torchrun_would(found):
    for number, rank in enumerate(found.of("variables")):
        wanted = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": "2"}
        assert rank | wanted | {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"} == rank
        assert rank["ACCELERATE_USE_CPU"] == "true"
        assert rank["DS_ACCELERATOR"] == "cpu"
    assert found.of("where_am_i") == [[n, 2, n, 2, 0, "cpu", "ddp"] for n in range(2)]


def test_a_program_needs_nothing_of_a_notebook(found):
    assert found.of("modules") == [[], []]


def test_closing_leaves_nothing_behind(found):
    assert found.of("closed") == [[False, None, True]] * 2
    assert found.returncode == 0, found.output
