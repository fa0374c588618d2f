"""What `ddl.generate` promises: the same text under every strategy, in order, with figures; mistakes in one line."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank.generation import options, prompts
from ddl_magics.rank.generation.plan import Share
from ddl_magics.rank.generation.result import Figures, Generated
from ddl_magics.rank.generation.stream import Printed, Text
from tests.strategies.models import llama
from tests.strategies.ranks import start

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(400)

GRIDS = ["axonn:2x1x1", "axonn:1x2x1", "axonn:1x1x2"]
SMALL = [
    "ddp",
    "zero:1",
    "zero:2",
    "zero:3 once",
    "zero:3 in every forward",
    "fsdp once",
    "fsdp in every forward",
    *GRIDS,
]

GRID_TOKENS = 3
"""The real model under AxoNN makes fewer: each costs a second or so on two cores."""


@pytest.fixture(scope="module")
def found(tmp_path_factory, smollm2):
    pytest.importorskip("deepspeed")
    pytest.importorskip("axonn")
    return start("../rank/generation_ranks.py", 2, tmp_path_factory.mktemp("generation"), str(smollm2), timeout=380)


# On two ranks


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero:3", "fsdp", *GRIDS])
def test_greedy_text_of_the_real_model_is_that_of_one_process(found, strategy):
    for rank in found.of("greedy_on_the_real_model"):
        wanted = rank["plain"] if strategy not in GRIDS else [tokens[:GRID_TOKENS] for tokens in rank["plain"]]
        assert rank[strategy]["tokens"] == wanted
        assert "The capital of France is Paris.".startswith(rank[strategy]["texts"][1])


@pytest.mark.mpi
@pytest.mark.parametrize("strategy", SMALL)
def test_greedy_tokens_are_those_of_each_prompt_alone(found, strategy):
    """In batches of any size, where texts end at different lengths, and where a rank has no prompt."""
    for rank in found.of("greedy_on_a_small_model"):
        assert rank[strategy] == rank["plain"]
        lengths = {len(text) for text in rank["plain"][1]}
        assert len(lengths) > 1, "no text ended early: the comparison says nothing about that"


@pytest.mark.mpi
def test_what_is_drawn_depends_on_the_seed_and_the_prompts_number_alone(found):
    for rank in found.of("sampled"):
        wanted = rank["single"]
        assert all(rank[other] == wanted for other in ("ddp", "zero:3", "axonn:2x1x1", "one at a time"))
        assert rank["another seed"] != wanted
        first, second = rank["twice the same prompt"]
        assert first == wanted[0]
        assert second != first
        assert rank["copies"][::2] == wanted[:2]
        assert rank["copies"][1] != wanted[0]


@pytest.mark.mpi
def test_without_a_seed_ranks_agree_on_one_and_tell_it(found):
    one, other = found.of("sampled")
    assert one["unseeded"] == other["unseeded"]
    assert one["unseeded"][0] != one["unseeded"][1]
    assert one["again by its seed"] == one["unseeded"][0]


@pytest.mark.mpi
def test_beams_are_searched_as_in_one_process(found):
    for rank in found.of("searched"):
        assert rank["ddp"] == rank["zero:3"] == rank["axonn:2x1x1"] == rank["plain"]
        assert rank["several"] == [4, rank["plain"][:2]]


@pytest.mark.mpi
@pytest.mark.parametrize("strategy", ["ddp", "zero:3", "axonn:2x1x1"])
def test_a_model_need_not_be_prepared(found, strategy):
    for rank in found.of("models_that_were_not_prepared"):
        assert rank[strategy] == rank["plain"]


@pytest.mark.mpi
@pytest.mark.parametrize("strategy", ["fsdp", "axonn:2x1x1"])
def test_shards_that_cannot_compute_are_named(found, strategy):
    for rank in found.of("shards_of_a_model_that_was_closed"):
        assert rank[strategy] == (
            f"UsageOnRankError: This LlamaForCausalLM is shards of {strategy}, which compute only when it is prepared. "
            "Write model = ddl.prepare(model) before."
        )


@pytest.mark.mpi
def test_a_program_chats_in_rank_0_s_terminal(found):
    """The first question is forgotten with its answer: the model has 64 positions, 6 of which are for the answer."""
    first, second = found.of("chat_in_a_program")
    assert first["messages"] == second["messages"]
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"] * 2
    assert [message["content"] for message in first["messages"][::2]] == ["How are you?", "What is your name?"]
    assert first["printed"].endswith(first["messages"][-1]["content"] + "\n")
    assert second["printed"] == ""
    for rank in (first, second):
        assert rank["gone"].startswith("UsageOnRankError: The model of this chat is gone")
        assert rank["closed"] == "UsageOnRankError: This chat is not open any more. Call ddl.chat again."
        assert rank["no template"].startswith("UsageOnRankError: This tokenizer has no chat template. ")


@pytest.mark.mpi
@pytest.mark.parametrize("strategy", ["zero:3", "fsdp"])
def test_training_goes_on_as_if_nothing_had_been_generated(found, strategy):
    for rank in found.of("what_is_left_of_a_model"):
        left = rank[strategy]
        silent, speaking = left["losses"]
        assert speaking == pytest.approx(silent, rel=1e-6)
        assert left["modes"] == [True, True, False]
        assert left["gradients"] == []
        assert left["memory"][0] == left["memory"][1]
        assert left["config"]


@pytest.mark.mpi
def test_text_streams_from_the_rank_that_makes_it(found):
    for number, rank in enumerate(found.of("streamed")):
        assert {said[0] for said in rank["heard"]} == {number}
        assert "".join(said[1] for said in rank["heard"]) == rank["texts"][number]
        assert [said[2] for said in rank["heard"]] == [False] * (len(rank["heard"]) - 1) + [True]
        assert len(rank["heard"]) > 3
        assert rank["printed"] == f"prompt {number}: {rank['texts'][number]}\n"


@pytest.mark.mpi
def test_figures_are_of_all_ranks(found):
    first, second = found.of("figures")
    assert first["report"] == second["report"]
    assert first["cache"][0] == first["cache"][1]
    assert (first["tokens"], first["prompts"], first["ranks"]) == (20, 5, 2)
    assert all(value > 0 for value in first["positive"])
    assert first["points"] == [["tokens/s", 1], ["first token (s)", 1]]
    assert first["report"].startswith("5 texts, 20 new tokens in ")


MISTAKES = {
    "no tokenizer": "A prompt is text and there is no tokenizer. ",
    "too long": "Prompt 1 has 30 tokens and max_new_tokens is 8, which is more than the 32 positions of the model. ",
    "no tokens wanted": "max_new_tokens=0 cannot be. ",
    "no prompts": "There are no prompts. ",
    "empty prompt": "Prompt 1 is empty: it has no tokens. ",
    "foreign token": "Prompt 0 has token 64, and the model knows 0 to 63. ",
    "no option": "generate has no option 'temprature'. Did you mean 'temperature'?",
    "ours": "generate decides output_scores itself. ",
    "batch size": "batch_size=0 cannot be. ",
    "sampled beams": "Beams that are sampled draw from one generator ",
    "greedy copies": "transformers refuses these options: ",
    "no prompt": "int is no list of prompts. ",
    "stop strings": "stop_strings need a tokenizer. ",
    "no language model": "MLP has no generate. ",
    "split": "axonn:2x1x1 computes with all its ranks, and gathers nothing. ",
    "some ranks": "generate puts the texts of all ranks together, and this cell runs on 1 of them. ",
    "other prompts": "Ranks [1] were given other prompts or options than rank 0. ",
}


@pytest.mark.mpi
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_on_all_ranks(found, mistake):
    for said in found.of("mistakes"):
        assert said[mistake].startswith(f"UsageOnRankError: {MISTAKES[mistake]}")
        assert "\n" not in said[mistake]


@pytest.mark.mpi
def test_a_mistake_of_one_rank_is_told_to_all(found):
    first, second = found.of("mistakes")
    assert first["one rank's mistake"].startswith("UsageOnRankError: There are no prompts. ")
    assert second["one rank's mistake"].startswith("UsageOnRankError: There are no prompts (on rank 0). ")
    assert first["afterwards"] == second["afterwards"] == "True"


# In this process


class Words:
    """A tokenizer that knows bytes, with a chat template."""

    chat_template = "yes"
    eos_token_id = pad_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": ([1] if add_special_tokens else []) + list(text.encode())}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        if any(message["role"] == "judge" for message in messages):
            raise ValueError("no judges here")
        return "".join(f"{message['role'][0]}{message['content']}" for message in messages)

    def decode(self, tokens, skip_special_tokens):
        return bytes(tokens).decode(errors="replace")


CHAT = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("ab", [[1, 97, 98]]),
        (["ab", "c"], [[1, 97, 98], [1, 99]]),
        (CHAT, [[115, 120, 117, 121]]),
        ([CHAT, "c"], [[115, 120, 117, 121], [1, 99]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], (7,)], [[5, 6], [7]]),
        (torch.tensor([5, 6]), [[5, 6]]),
        (torch.tensor([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([torch.tensor([5]), "c"], [[5], [1, 99]]),
        (
            {"input_ids": torch.tensor([[0, 5], [6, 7]]), "attention_mask": torch.tensor([[0, 1], [1, 1]])},
            [[5], [6, 7]],
        ),
        ({"input_ids": [5, 6]}, [[5, 6]]),
    ],
)
def test_prompts_of_every_form_are_read(given, tokens):
    assert prompts.read(given, Words()) == tokens


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([[{"role": "judge", "content": "x"}]], "The chat template cannot take prompt 0: no judges here. "),
        ([1.5], "Prompt 0 is a float, which is no prompt. "),
        ({"text": "x"}, "A dict with text is no prompt. "),
    ],
)
def test_what_is_no_prompt_is_refused(given, line):
    with pytest.raises(UsageOnRankError, match=line):
        prompts.read(given, Words())


def test_a_chat_needs_a_template():
    words = Words()
    words.chat_template = None
    with pytest.raises(UsageOnRankError, match="this tokenizer has no chat template"):
        prompts.read([CHAT], words)


def test_shares_are_in_order_and_even():
    shares = [Share(rank, 3).slice_of(7) for rank in range(3)]
    assert [number for share in shares for number in share] == list(range(7))
    assert {len(share) for share in shares} == {2, 3}
    assert Share(2, 3).turns(7, 2) == 2
    assert Share(0, 3).turns(7, None) == Share(0, 3).turns(1, None) == 1
    assert [list(Share(rank, 4).slice_of(1)) for rank in range(4)] == [[0], [], [], []]


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.8},
        {"do_sample": True},
        {"do_sample": True, "top_k": 0, "min_p": 0.05},
        {"do_sample": True, "typical_p": 0.6, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
        {"do_sample": True, "top_h": 0.5},
    ],
    ids=str,
)
def test_options_shape_the_distribution_as_transformers_does(given):
    """The processors that we put before our draw, against those that transformers makes of the same options."""
    from ddl_magics.rank.generation.draws import warpers

    torch.manual_seed(0)
    model = llama(tied=False)
    scores = torch.randn(3, 64) * 4
    read = options.read(model, None, 4, given)
    assert read.config.do_sample is False
    mine = scores.clone()
    for processor in warpers(read.sampling, scores.device):
        mine = processor(None, mine)
    config, _ = model._prepare_generation_config(None, **(given | {"do_sample": True}))
    model._prepare_special_tokens(config, True, device=scores.device)
    theirs = model._get_logits_processor(config, input_ids_seq_length=1, logits_processor=[])(None, scores.clone())
    torch.testing.assert_close(mine, theirs)


def test_draws_follow_the_probabilities():
    from ddl_magics.rank.generation.draws import OwnDraws, generator_of

    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.0])
    rows = 4000
    draws = OwnDraws([], [generator_of(1, number, 0, torch.device("cpu")) for number in range(rows)])
    only = draws(None, probabilities.log().expand(rows, 4).clone())
    chosen = only.argmax(-1)
    counts = torch.bincount(chosen, minlength=4) / rows
    torch.testing.assert_close(counts, probabilities, atol=0.03, rtol=0)  # four standard deviations
    assert torch.isinf(only).sum() == 3 * rows


def test_temperature_zero_takes_the_most_probable_token():
    assert options.read(llama(tied=False), None, 4, {"temperature": 0}).sampling is None
    assert options.read(llama(tied=False), None, 4, {"temperature": 0.5}).sampling["temperature"] == 0.5


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
def test_sampling_options_out_of_range_are_refused(name):
    with pytest.raises(UsageOnRankError):
        options.read(llama(tied=False), None, 4, {name: -1})


def test_pieces_are_whole_characters_and_make_up_the_text():
    text, said = Text(Words()), "Grüße, 日本!"
    pieces = [text.add(byte) for byte in said.encode()]
    assert "".join(pieces) + text.end() == said
    assert set(pieces) <= {*said, ""}


def test_a_text_that_breaks_off_in_a_character_ends_all_the_same():
    text = Text(Words())
    assert [text.add(byte) for byte in "ü".encode()[:1]] == [""]
    assert text.end() == "\ufffd"


def test_others_are_printed_when_the_first_text_is_over():
    written = []
    printed = Printed(several=True, write=written.append)
    for said in [(4, "a", False), (5, "x\n", False), (5, "y", True), (4, "b", False), (4, "c", True), (6, "z", True)]:
        printed(*said)
    assert "".join(written) == "prompt 4: abc\nprompt 5: x\ny\nprompt 6: z\n"


FIGURES = Figures("zero:3", 2, 2, 30, 1.5, 0.25, 0.04, 1.2, 2_500_000, 3_000_000_000, "in every forward", None)


def test_the_report_reads_as_a_table():
    assert Generated(["a", "b"], [[1], [2]], FIGURES).report() == (
        "2 texts, 30 new tokens in 1.50 s, 2 ranks under zero:3, weights gathered in every forward\n"
        "  tokens/s             20.0\n"
        "  time to first token  250.0 ms\n"
        "  between tokens       40.0 ms (95 %: 1.20 s)\n"
        "  KV cache             2.5 MB a rank\n"
        "  memory               3.0 GB a rank at the peak"
    )


def test_the_result_is_a_list_and_travels():
    made = pickle.loads(pickle.dumps(Generated(["a", "b"], [[1], [2]], FIGURES)))
    assert made == ["a", "b"]
    assert (made.tokens, made.figures) == ([[1], [2]], FIGURES)
    assert repr(made).startswith("[0] a\n[1] b\n2 texts, ")


def test_a_result_needs_no_torch():
    code = "import sys, ddl_magics.rank.generation.result; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
