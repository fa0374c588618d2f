"""After a rank failed and the process group was made anew: prepared models go on, or say why not, and nothing leaks.

In each scenario the last rank fails while the others are in a collective of the same step, and frees them.
"""

from __future__ import annotations

import pytest

from tests.strategies import ranks

PLACES = "forward,backward,between,updated"
"""Where a rank fails: in the forward, in a hook of the backward, before `step`, and right after its own update."""
DDP = "forward,backward,updated"
"""Before `step` is no place for ddp: the others need nobody for their update, see `out_of_step`."""
GOES_ON = {
    2: (
        f"ddp {DDP}",
        *(f"{strategy} {PLACES}" for strategy in ("zero:1", "zero:2", "zero:3", "fsdp", "axonn:2x1x1")),
        *(f"{strategy} forward 2" for strategy in ("ddp", "zero:2", "zero:3", "fsdp", "axonn:2x1x1")),
        "ddp,find_unused_parameters=true backward",
        "axonn:2x1x1,overlap=1 backward",
        "zero:2,offload=cpu updated",
        "zero:3,offload=cpu,offload_param=cpu updated",
        "zero:2 updated 1 bf16-true",
        "zero:3 updated 1 bf16-true",
        "fsdp,offload=cpu updated",
        "fsdp between 2 bf16-mixed",
    ),
    4: (f"axonn:2x2x1 {PLACES}", "axonn:2x2x1 forward 2"),
}
EVERYWHERE = ("ddp backward", "zero:2 backward", "zero:3 between", "fsdp backward", "axonn:2x1x1 between")
MORE = (
    *(f"fails_everywhere {run}" for run in EVERYWHERE),
    "many_models",
    "cannot_be_taken_over",
    "only_some_have_it",
    "a_program_makes_the_group_anew",
    "shards_before_prepare",
    "evaluation",
    "out_of_step ddp between",
    "out_of_step zero:2 updating",
    "out_of_step zero:2 half-updated",
)
RUNS = [(size, run) for size, runs in GOES_ON.items() for run in runs]

pytest.importorskip("deepspeed")
pytest.importorskip("axonn")
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks of a world found; each world is started once."""
    findings = {}

    def start(size):
        if size not in findings:
            checks = [f"goes_on {run}" for run in GOES_ON[size]] + list(MORE if size == 2 else ())
            folder = tmp_path_factory.mktemp(f"recovery{size}")
            findings[size] = ranks.start("recovery_ranks.py", size, folder, *checks, timeout=220)
        return findings[size]

    return start


@pytest.mark.parametrize(("size", "run"), RUNS, ids=[f"{run} on {size} ranks" for size, run in RUNS])
def test_training_goes_on_as_if_nothing_had_happened(found, size, run):
    """The step that failed is made again, unless every rank had updated its weights before; no model is made again."""
    places = run.split(" ")[1].split(",")
    *others, failed = found(size).of(f"goes_on {run}")
    assert set(failed["raised"].values()) == {"BrokenError"}
    assert all(set(other["raised"].values()) == {"RuntimeError"} for other in others)
    for finding in (*others, failed):
        assert finding["losses"] == pytest.approx(finding["expected"], rel=1e-6)
        assert finding["made"] == {place: int(place == "updated") for place in places}
        assert finding["told"] == failed["told"]
        assert all(told["closed"] == {} and told["torn"] == [] for told in finding["told"].values())
    assert len(set(failed["losses"])) == len(failed["losses"]), "nothing was learnt: the comparison says nothing"


@pytest.mark.parametrize("run", EVERYWHERE)
def test_half_a_step_is_known_and_forgotten_also_where_all_ranks_failed_alike(found, run):
    for finding in found(2).of(f"fails_everywhere {run}"):
        assert [finding[when] for when in ("before", "unsettled", "after")] == [False, True, False]
        assert finding["losses"] == pytest.approx(finding["expected"], rel=1e-6)


def test_ten_failures_leave_no_thread_no_file_and_no_group(found):
    for finding in found(2).of("many_models"):
        assert finding["counts"][-1] == finding["counts"][0]


def test_several_models_go_on_whichever_failed(found):
    for finding in found(2).of("many_models"):
        assert finding["equal"] == [True] * 10, "recovery changed weights"
        for turn, told in enumerate(finding["told"]):
            assert told["models"] == dict.fromkeys(("MLP", "MLP 2", "MLP 3", "MLP 4", "MLP 5"), turn + 1)
        expected = finding["losses"]["ddp"]
        for losses in finding["losses"].values():
            assert losses == pytest.approx(expected, rel=1e-5)


def test_a_model_that_one_rank_cannot_take_over_is_closed_on_all_and_says_why(found):
    for finding in found(2).of("cannot_be_taken_over"):
        assert finding["told"]["models"] == {"MLP": 1, "MLP 3": 1}
        (reason,) = finding["told"]["closed"].values()
        assert list(finding["told"]["closed"]) == ["MLP 2"]
        assert reason.endswith("could not be taken over on rank 1 (OSError: no space)")
        for use in ("call", "backward", "step", "state_dict"):
            assert finding[use] == f"MLP cannot be used any more: {reason}. Build and prepare it again."
        assert finding["module"] == "MLP"
        first, third = finding["losses"]
        assert first == pytest.approx(third, rel=1e-5)


def test_a_model_that_some_ranks_lack_is_closed_and_later_ones_go_on(found):
    first, second = found(2).of("only_some_have_it")
    assert first["told"]["closed"] == {"MLP 2": "the process group was made anew, and rank 1 has no such model"}
    assert first["said"].startswith("MLP cannot be used any more: the process group was made anew, and rank 1 has no")
    assert second["told"]["closed"] == {}
    for finding in (first, second):
        assert finding["told"]["models"] == {"MLP": 0}
        assert finding["again"] == {"models": {"MLP": 1, "MLP 2": 1}, "torn": [], "closed": {}}


def test_a_model_goes_on_where_a_program_destroyed_the_group_and_made_it_again(found):
    for finding in found(2).of("a_program_makes_the_group_anew"):
        assert finding["losses"] == pytest.approx(finding["expected"], rel=1e-6)


def test_shards_that_are_not_prepared_yet_are_taken_over(found):
    for finding in found(2).of("shards_before_prepare"):
        assert finding["equal"]
        assert finding["loss"] > 0


@pytest.mark.parametrize("strategy", ["ddp", "zero:2", "zero:3", "fsdp", "axonn:2x1x1"])
def test_models_for_evaluation_go_on(found, strategy):
    for finding in found(2).of("evaluation"):
        assert finding[strategy]["after"] == finding[strategy]["before"]
        assert finding[strategy]["told"]["models"] == {"MLP": 0}


@pytest.mark.parametrize(
    ("run", "torn"), [("ddp between", []), ("zero:2 updating", ["MLP"]), ("zero:2 half-updated", ["MLP"])]
)
def test_ranks_that_are_out_of_step_are_told(found, run, torn):
    """Some have updated their weights and one has not: nothing can undo it; training goes on with what there is."""
    first, failed = found(2).of(f"out_of_step {run}")
    assert first["told"] == {"models": {"MLP": 2}, "torn": [], "closed": {}}
    assert failed["told"] == {"models": {"MLP": 1}, "torn": torn, "closed": {}}
    assert all(0 < loss < 10 for finding in (first, failed) for loss in finding["losses"])


def test_libraries_print_nothing_but_what_they_always_print(found):
    for size in GOES_ON:
        assert found(size).returncode == 0
        known = ("ddl: axonn:", "find_unused_parameters=True was specified in DDP constructor")
        assert [line for line in found(size).output.splitlines() if not any(part in line for part in known)] == []
