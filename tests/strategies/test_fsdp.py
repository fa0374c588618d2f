"""What is fsdp's own: blocks, what is gathered when, precision, an optimizer with state, failures inside a block."""

from __future__ import annotations

import pytest
import torch

from ddl_magics.strategies.fsdp_blocks import blocks
from ddl_magics.strategies.fsdp_shards import rows_of
from tests.strategies import ranks
from tests.strategies.models import MLP, llama, opt

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All checks of `fsdp_ranks.py` on two ranks."""
    return ranks.start("fsdp_ranks.py", 2, tmp_path_factory.mktemp("fsdp"), timeout=140)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])


def test_the_blocks_of_transformers_are_those_that_its_models_name():
    for model, layers in ((llama(tied=True), "model.layers"), (opt(), "model.decoder.layers")):
        assert blocks(model) == list(model.get_submodule(layers))
        assert blocks(torch.nn.ModuleDict({"inside": model})) == blocks(model)


def test_other_models_have_repeated_members_made_of_modules_as_blocks():
    model = torch.nn.Module()
    model.embedding = torch.nn.Embedding(4, 4)
    model.body = torch.nn.Sequential(Block(), torch.nn.Dropout(), Block())
    assert blocks(model) == [model.body[0], model.body[2]]


def test_what_stays_with_the_root():
    """Single layers, members of several classes, a model alone, and blocks that share a weight."""
    assert blocks(MLP()) == []
    assert blocks(torch.nn.Sequential(Block(), MLP())) == []
    assert blocks(Block()) == []
    tied = torch.nn.Sequential(Block(), Block(), Block())
    tied[0].inner[0].weight = tied[1].inner[0].weight
    assert blocks(tied) == [tied[2]]


@pytest.mark.parametrize(("length", "size"), [(8, 4), (7, 4), (5, 4), (1, 4), (0, 2), (9, 2)])
def test_rows_are_dealt_out_as_torch_chunks_them(length, size):
    chunks = [len(chunk) for chunk in torch.arange(length).chunk(size)] if length else []
    dealt = [len(range(length)[rows_of(length, rank, size)]) for rank in range(size)]
    assert dealt == chunks + [0] * (size - len(chunks))


def test_the_model_keeps_its_class_and_its_names(found):
    for finding in found.of("names"):
        assert finding["class"] == finding["after"] == "LlamaForCausalLM"
        assert finding["is one"]
        assert finding["renamed"] == []
        assert finding["same names"]
        assert finding["state"]
        assert finding["plain"], "after close it is of its own class again"


def test_a_rank_holds_its_rows_and_one_block_while_it_computes(found):
    for finding in found.of("memory"):
        share = finding["whole"] / 2
        for moment in ("rest", "evaluated", "between", "after"):
            assert finding[moment]["parameters"] == pytest.approx(share, rel=0.02), moment
        assert finding["between"]["gradients"] == pytest.approx(share, rel=0.02)
        assert finding["after"]["gradients"] == 0
        gathered = finding["inside"] - share
        one_block_of_two = finding["layers"] / 2
        assert one_block_of_two <= gathered <= finding["root"] + one_block_of_two


def test_an_optimizer_that_has_stepped_keeps_its_state(found):
    for finding in found.of("optimizer_with_state"):
        assert finding["fsdp"] == pytest.approx(finding["ddp"], rel=1e-6)
        assert len(set(finding["fsdp"])) == 3


def test_a_batch_in_parts_trains_as_the_whole(found):
    for finding in found.of("accumulation"):
        assert finding["3 parts"] == pytest.approx(finding["1 parts"], rel=1e-6)


def test_bf16_mixed_computes_in_bf16_and_updates_in_fp32(found):
    for finding in found.of("mixed"):
        assert finding["gathered"] == finding["logits"] == ["torch.bfloat16"]
        assert finding["weights"] == finding["gradients"] == ["torch.float32"]


def test_training_goes_on_after_a_failure_inside_a_block(found):
    for finding in found.of("half_way"):
        assert finding["losses"] == pytest.approx(finding["expected"], rel=1e-6)


def test_a_closed_model_can_be_prepared_again_otherwise(found):
    for finding in found.of("prepared_again"):
        assert finding["same"]
        assert finding["losses"][-1] == pytest.approx(finding["losses"][0], rel=0.1)


def test_a_parameter_without_rows_is_refused_by_name(found):
    for finding in found.of("refused"):
        assert finding["number"].startswith("fsdp shards by rows, and temperature of this MLP has no dimension")


def test_muon_trains_as_on_whole_matrices(found):
    for finding in found.of("muon"):
        assert finding["fsdp"] == pytest.approx(finding["ddp"], rel=1e-4)  # it computes in bf16


def test_ranks_may_have_no_row_of_a_parameter(found):
    first, second = found.of("one_rank_more_than_rows")
    assert (first["rows"], second["rows"]) == ([1, 1, 3, 3], [0, 0, 2, 2])
    for finding in (first, second):
        assert finding["same"]
        assert finding["norm"] == pytest.approx(first["norm"])
        assert finding["norm"] > 0


def test_nothing_is_printed(found):
    assert found.output == ""
    assert found.returncode == 0
