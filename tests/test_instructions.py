"""Instruction data: what counts in the loss, what is cut, and that packed pairs are worth what padded ones are."""

from __future__ import annotations

import pickle

import pytest
import torch

from ddl_magics.errors import DDLError
from ddl_magics.instructions import PLAIN, answer_tokens, encode_pairs, pack, pad
from tests.strategies.models import llama

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s> {% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
PAIRS = [
    ("add one", "x + 1"),
    ("say nothing at all to anyone who asks for it", "no"),
    ("count", "one two three four five six seven"),
    ("name a colour", "red or blue"),
    ("why", "because it is so and not otherwise"),
]


@pytest.fixture
def tokenizer():
    """A word is a token; begins no text by itself."""
    words = sorted({word for text in [PLAIN, CHAT, *sum(PAIRS, ())] for word in [*text.split(), "user", "assistant"]})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", "<s>", "</s>", *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def counted(tokenizer, row):
    """Text of the tokens that count in the loss."""
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def shown(tokenizer, row):
    """Text before the answer."""
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    return tokenizer.decode([token for token, label in pairs if label == -100])


def test_the_answer_and_its_end_count_and_nothing_else(tokenizer):
    for row, (prompt, answer) in zip(encode_pairs(PAIRS, tokenizer), PAIRS, strict=True):
        assert counted(tokenizer, row) == f"{answer} </s>"
        assert f"Instruction: {prompt}" in shown(tokenizer, row)
        assert len(row["input_ids"]) == len(row["labels"])


def test_a_chat_template_is_used_where_the_tokenizer_has_one(tokenizer):
    tokenizer.chat_template = CHAT
    row = encode_pairs([("add one", "x + 1")], tokenizer)[0]
    assert shown(tokenizer, row) == "<s> user add one </s> <s> assistant"
    assert counted(tokenizer, row) == "x + 1 </s>"


@pytest.mark.parametrize("template", ["why {prompt} because", lambda prompt: f"why {prompt} because"])
def test_a_template_may_be_a_text_or_a_function(tokenizer, template):
    tokenizer.chat_template = CHAT
    row = encode_pairs([("add one", "red")], tokenizer, template=template)[0]
    assert shown(tokenizer, row) == "why add one because"


def test_a_beginning_that_the_tokenizer_sets_before_a_text_is_there_once(tokenizer):
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert shown(tokenizer, encode_pairs([("add", "red")], tokenizer, template="{prompt}")[0]) == "<s> add"
    tokenizer.chat_template = CHAT  # begins with it already
    assert shown(tokenizer, encode_pairs([("why", "red")], tokenizer)[0]) == "<s> user why </s> <s> assistant"


@pytest.mark.parametrize("room", [8, 10, 12, 16])
def test_what_is_too_long_keeps_its_template_and_some_of_its_answer(tokenizer, room):
    tokenizer.chat_template = "<s>user {{ messages[0]['content'] }} </s> assistant"
    for row, (_, answer) in zip(encode_pairs(PAIRS, tokenizer, max_length=room), PAIRS, strict=True):
        assert len(row["input_ids"]) <= room
        assert shown(tokenizer, row).endswith("</s> assistant")
        kept = counted(tokenizer, row).removesuffix(" </s>")
        assert answer.startswith(kept)
        assert len(kept.split()) >= min(len(answer.split()), room - room // 2 - 1)
        if counted(tokenizer, row).endswith("</s>"):
            assert kept == answer, "a cut answer has no end"


def test_mistakes_are_told_in_one_line(tokenizer):
    said = []
    for call in (
        lambda: encode_pairs([("a",)], tokenizer),
        lambda: encode_pairs([("a", "b"), ("a", " ")], tokenizer),
        lambda: encode_pairs([("a", "b")], tokenizer, max_length=4),
        lambda: encode_pairs([("a", "b")], tokenizer, template="no place"),
        lambda: pack([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}], 2),
        lambda: pad(tokenizer, side="top"),
    ):
        with pytest.raises(DDLError) as error:
            call()
        said.append(str(error.value))
    assert said == [
        "Pair 0 is ('a',). Give (prompt, answer), both texts.",
        "Pair 1 has no answer. Leave it out.",
        "max_length=4 leaves no room for pair 0: the template alone has 4 tokens. Give 10 or more.",
        "The template 'no place' has no {prompt}. Write it where the prompt goes.",
        "A row has 3 tokens, and max_length is 2. Encode with this max_length.",
        "There is no side 'top'. Valid: right, left.",
    ]


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_seen_by_nobody_and_counts_nowhere(tokenizer, side):
    rows = encode_pairs(PAIRS, tokenizer)
    collate = pickle.loads(pickle.dumps(pad(tokenizer, side=side, multiple_of=8)))  # workers get it so
    batch = collate(rows)
    assert batch["input_ids"].shape[1] % 8 == 0
    for row, ids, labels, mask in zip(rows, *batch.values(), strict=True):
        real = mask.bool()
        assert ids[real].tolist() == row["input_ids"]
        assert labels[real].tolist() == row["labels"]
        assert set(labels[~real].tolist()) <= {-100}
        assert bool(real[0 if side == "right" else -1])
    assert answer_tokens(batch) == sum(label != -100 for row in rows for label in row["labels"])


def test_packing_loses_no_token_and_leaves_little_room(tokenizer):
    rows = encode_pairs(PAIRS, tokenizer)
    packed = pack(rows, 32)
    assert len(packed) < len(rows)
    assert all(len(row["input_ids"]) <= 32 for row in packed)
    assert pack(rows, 32) == packed
    assert sorted(sum((row["input_ids"] for row in packed), [])) == sorted(sum((row["input_ids"] for row in rows), []))
    assert sum(row["position_ids"].count(0) for row in packed) == len(rows)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_packed_pairs_have_the_loss_and_the_gradient_of_padded_ones(tokenizer, attention, mode):
    torch.manual_seed(0)
    model = llama(tied=False)
    model.set_attn_implementation(attention)
    model.train(mode == "train")
    rows = [{name: [token % 64 if token >= 0 else token for token in tokens] for name, tokens in row.items()}
            for row in encode_pairs(PAIRS, tokenizer)]  # fmt: skip
    found = []
    for batch in (pad(tokenizer)(rows), pad(tokenizer)(pack(rows, 32))):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.append((loss.item(), answer_tokens(batch).item(), [p.grad.clone() for p in model.parameters()]))
    padded, packed = found
    assert packed[1] == padded[1]
    assert packed[0] == pytest.approx(padded[0], rel=1e-6)
    for one, other in zip(packed[2], padded[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_without_the_mask_packed_pairs_would_see_one_another(tokenizer):
    """What the mask is for: a batch with positions alone has another loss in training, where a cache is made."""
    torch.manual_seed(0)
    model = llama(tied=False).train()
    rows = [{name: [token % 64 if token >= 0 else token for token in tokens] for name, tokens in row.items()}
            for row in encode_pairs(PAIRS, tokenizer)]  # fmt: skip
    batch = pad(tokenizer)(pack(rows, 32))
    right = model(**batch).loss.item()
    assert model(**{**batch, "attention_mask": None}).loss.item() != pytest.approx(right, rel=1e-4)
