"""What `axonn` promises beside parity: whole weights, memory, what is split and what not, nothing left behind."""

from __future__ import annotations

import pytest

from tests.strategies import ranks

GRIDS = {
    2: ("1x1x1", "2x1x1", "1x2x1", "1x1x2"),
    4: ("1x1x1", "2x1x1", "1x2x1", "1x1x2", "2x2x1", "2x1x2", "1x2x2", "4x1x1", "1x4x1", "1x1x4"),
}
CHECKS = (
    "start_from_rank_zero",
    "resumed_optimizer",
    "unequal_ranks",
    "layers_that_stay_whole",
    "torch_transformer",
    "module_stays_as_it_was",
    "generation",
    "refusals",
    "traffic",
    "alternation",
)

pytest.importorskip("axonn")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(250)]
worlds = pytest.mark.parametrize(("size", "grid"), [(size, grid) for size, grids in GRIDS.items() for grid in grids])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks of a world found; each world is started once."""
    findings = {}

    def start(size):
        if size not in findings:
            folder = tmp_path_factory.mktemp(f"axonn{size}")
            checks = [f"{check} {grid}" for grid in GRIDS[size] for check in ("memory", "round_trip")]
            more = CHECKS if size == 2 else ()
            findings[size] = ranks.start("axonn_ranks.py", size, folder, *checks, *more, timeout=240)
        return findings[size]

    return start


@worlds
def test_whole_weights_go_in_and_come_out_under_every_grid(found, size, grid):
    for finding in found(size).of(f"round_trip {grid}"):
        assert finding["names"]
        assert finding["equal"] == 0
        assert finding["tied"]
        assert finding["without tied name"] == 0


@worlds
def test_weights_that_do_not_fit_are_refused_and_change_nothing(found, size, grid):
    for finding in found(size).of(f"round_trip {grid}"):
        assert finding["unchanged"] == 0
        for fault in ("1 missing (down.bias)", "1 unexpected (more)", "up.weight (2, 2) for (64, 16)"):
            assert fault in finding["told"]


@worlds
def test_memory_per_rank_is_what_theory_says(found, size, grid):
    for finding in found(size).of(f"memory {grid}"):
        expected = finding["expected"]
        assert finding["held"]["parameters"] == pytest.approx(expected, rel=0.05)
        assert finding["held"]["gradients"] == pytest.approx(expected, rel=0.05)
        assert finding["held"]["optimizer"] == pytest.approx(2 * expected, rel=0.05)
        assert finding["after"]["gradients"] == 0


@worlds
def test_the_user_is_told_which_share_is_split(found, size, grid):
    for finding in found(size).of(f"memory {grid}"):
        (note,) = finding["notes"]
        assert note.startswith(f"axonn:{grid} splits 81% of the parameters (3 of 4 Linear layers)")


def test_ranks_that_built_different_models_start_from_rank_zero(found):
    assert found(2).of("start_from_rank_zero") == [True, True]


def test_an_optimizer_goes_on_with_its_state_groups_and_settings(found):
    for finding in found(2).of("resumed_optimizer"):
        assert finding["difference"] < 1e-6
        assert finding["settings kept"]
        assert finding["norm"] is None  # none was asked for


def test_slices_of_unequal_length_and_seldom_used_parameters_give_the_mean(found):
    for finding in found(2).of("unequal_ranks"):
        assert finding["difference"] < 1e-6
        assert finding["unused stays without gradient"]


def test_layers_that_the_grid_cannot_split_stay_whole(found):
    for finding in found(2).of("layers_that_stay_whole"):
        assert finding["gpt2"] < 1e-6
        assert "splits nothing" in finding["gpt2 notes"][0]
        assert finding["odd"] == ["Linear", "ParallelLinear", "ParallelLinear"]
        assert finding["single"] < 1e-6
        assert finding["single's optimizer"] == [16, 4]


def test_torch_transformer_layers_run_in_inference(found):
    assert max(found(2).of("torch_transformer")) < 1e-5


def test_frozen_parameters_hooks_precision_and_copies_survive(found):
    for finding in found(2).of("module_stays_as_it_was"):
        assert finding["frozen"]
        assert finding["calls"] == 3  # plain, split, copied
        assert finding["difference"] < 1e-14
        assert finding["copy"] < 1e-14


def test_ranks_generate_together_and_end_apart(found):
    assert found(2).of("generation") == [{"equal": True, "length": 7}, {"equal": True, "length": 13}]


def test_what_cannot_be_prepared_is_refused_in_one_line(found):
    for told in found(2).of("refusals"):
        assert "prepared already, under axonn:2x1x1" in told["twice"]
        assert "split over axonn:2x1x1 already and cannot move to axonn:1x2x1" in told["other grid"]
        assert "Muon updates a weight by its rows and columns" in told["muon"]
        assert told["same grid"] == ""
        assert "taken apart since" in told["grid is gone"]


def test_gradients_stay_on_the_rank_before_the_boundary(found):
    for counts in found(2).of("traffic"):
        assert counts["before"] == 0
        assert 0 < counts["at"] <= 4


def test_strategies_alternate_without_leaking_groups_threads_or_files(found):
    for counts in found(2).of("alternation"):
        for stage, censuses in counts.items():
            first = censuses[0]
            assert all(census["task"] == first["task"] for census in censuses), (stage, censuses)
            # Single files come and go; one group would leave five of them.
            assert all(abs(census["fd"] - first["fd"]) <= 2 for census in censuses), (stage, censuses)
        assert counts["closed"][0]["task"] < counts["kept"][0]["task"]
        assert counts["rebuilt"][0]["task"] <= counts["closed"][0]["task"]
