"""Instruction data for fine-tuning: pairs of prompt and answer as token rows, padded or packed into batches.

Only the answer and the end of it count in the loss; everything else has the label -100, which torch's cross entropy
and models of transformers leave out. For `input_ids` and `labels` in the same place: models of transformers shift them.
Runs on ranks, or anywhere else with torch; the tokenizer is one of transformers. Limits: one turn, text only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.errors import UsageOnRankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Row = dict[str, list[int]]
    Template = str | Callable[[str], str]

IGNORED = -100
"""Label of a token that does not count in the loss."""

PLAIN = "### Instruction:\n{prompt}\n\n### Response:\n"
"""Template of tokenizers that bring none: Alpaca's (Taori et al. 2023), without its preamble."""


# Pairs to rows


def encode_pairs(
    pairs: Iterable[tuple[str, str]], tokenizer: Any, max_length: int = 512, template: Template | None = None
) -> list[Row]:
    """Tokens of pairs of prompt and answer.

    Parameters
    ----------
    pairs
        Prompts and answers.
    tokenizer
        One of transformers.
    max_length
        Most tokens of a row. What is too long loses the end of its prompt, inside the template, down to half of the
        room; then the end of its answer, and with it the token that ends it.
    template
        A text with `{prompt}` in it, or a function from prompt to text; None: the tokenizer's chat template, or else
        `PLAIN`.

    Returns
    -------
    For each pair `input_ids` and `labels`, of one length; labels of the prompt are -100.

    Raises
    ------
    UsageOnRankError
        A pair is none of two texts, or has no answer; the tokenizer has no end; the template needs all the room.
    """
    encoder = _Encoder(tokenizer, max_length, _renderer(tokenizer, template))
    return [encoder.row(number, pair) for number, pair in enumerate(pairs)]


def _renderer(tokenizer: Any, template: Template | None) -> Callable[[str], str]:
    """From a prompt to the text after which the answer begins."""
    if template is None and getattr(tokenizer, "chat_template", None):
        return lambda prompt: str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
        )
    if callable(template):
        return template
    text = PLAIN if template is None else template
    if "{prompt}" not in text:
        raise UsageOnRankError(f"The template {text!r} has no {{prompt}}", "Write it where the prompt goes.")
    return lambda prompt: text.replace("{prompt}", prompt)


class _Encoder:
    """Makes rows of one kind."""

    def __init__(self, tokenizer: Any, max_length: int, render: Callable[[str], str]) -> None:
        if tokenizer.eos_token_id is None:
            raise UsageOnRankError("This tokenizer has no token that ends a text", "Set tokenizer.eos_token.")
        self._tokenizer = tokenizer
        self._room = max_length
        self._render = render
        first = tokenizer("a").input_ids[:1]
        self._begins = first == [tokenizer.bos_token_id]

    def row(self, number: int, pair: Any) -> Row:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UsageOnRankError(f"Pair {number} is {pair!r:.60}", "Give (prompt, answer), both texts.")
        prompt, answer = pair
        if not answer.strip():
            raise UsageOnRankError(f"Pair {number} has no answer", "Leave it out.")
        end = [*self._tokens(answer), self._tokenizer.eos_token_id]
        begin = self._beginning(number, prompt, max(self._room - len(end), self._room // 2))
        end = end[: self._room - len(begin)]
        return {"input_ids": begin + end, "labels": [IGNORED] * len(begin) + end}

    def _beginning(self, number: int, prompt: str, most: int) -> list[int]:
        """Tokens up to the answer, at most so many: the prompt is cut at its end, the template stays whole."""
        begin = self._rendered(prompt)
        if len(begin) <= most:
            return begin
        template = len(self._rendered(""))
        if template > most:
            raise UsageOnRankError(
                f"max_length={self._room} leaves no room for pair {number}: the template alone has {template} tokens",
                f"Give {2 * template + 2} or more.",
            )
        own = self._tokens(prompt)
        left = len(own)
        while len(begin) > most:  # tokens at the cut may join otherwise, so once may not be enough
            left = max(left - (len(begin) - most), 0)
            begin = self._rendered(self._tokenizer.decode(own[:left]))
        return begin

    def _rendered(self, prompt: str) -> list[int]:
        text = self._render(prompt)
        ids = self._tokens(text)
        begin = self._tokenizer.bos_token_id
        return [begin, *ids] if self._begins and ids[:1] != [begin] else ids

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


# Rows to batches


def pack(rows: Sequence[Mapping[str, Sequence[int]]], max_length: int) -> list[Row]:
    """Put several rows into one, longest first, each where it still fits (first fit decreasing).

    The new rows have `position_ids` too, which begin at 0 with every pair. `Padding` makes an attention mask of them
    that keeps pairs apart. The order is another than before; it is the same for the same rows.

    Raises
    ------
    UsageOnRankError
        A row is longer than `max_length`.
    """
    packed: list[Row] = []
    open_rows: list[Row] = []
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        size = len(row["input_ids"])
        if size > max_length:
            raise UsageOnRankError(
                f"A row has {size} tokens, and max_length is {max_length}", "Encode with this max_length."
            )
        home = next((one for one in open_rows if len(one["input_ids"]) + size <= max_length), None)
        if home is None:
            home = {"input_ids": [], "labels": [], "position_ids": []}
            packed.append(home)
            open_rows.append(home)
        home["input_ids"] += row["input_ids"]
        home["labels"] += [IGNORED, *row["labels"][1:]]  # nothing before it says what a pair begins with
        home["position_ids"] += range(size)
        if len(home["input_ids"]) == max_length:
            open_rows.remove(home)
    return packed


def pad(tokenizer: Any, side: str = "right", multiple_of: int = 1) -> Padding:
    """Give a `collate_fn` for a DataLoader over rows: all of a batch as long as its longest.

    Parameters
    ----------
    tokenizer
        Tells the token to pad with, or that of its end.
    side
        `right` for training, `left` for generation.
    multiple_of
        Of which the length is a multiple: 8 suits tensor cores.
    """
    token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise UsageOnRankError("This tokenizer has no token to pad with", "Set tokenizer.pad_token.")
    if side not in {"right", "left"}:
        raise UsageOnRankError(f"There is no side {side!r}", "Valid: right, left.")
    return Padding(token, side, multiple_of)


@dataclass(frozen=True)
class Padding:
    """A `collate_fn` that pads; see `pad`.

    Plain rows get an `attention_mask` `[batch, length]` of 0 and 1. Packed ones get `[batch, 1, length, length]`: 0
    where a token may look (itself and what is before it in its own pair), the least fp32 number elsewhere. Models of
    transformers add that to their attention, sdpa and eager, not flash attention. It is explicit because they read
    packing from `position_ids` only while no cache is made, and a model that trains makes one.
    """

    token: int
    side: str = "right"
    multiple_of: int = 1

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        length = -(-longest // self.multiple_of) * self.multiple_of
        batch = {
            "input_ids": self._stack([row["input_ids"] for row in rows], length, self.token),
            "labels": self._stack([row["labels"] for row in rows], length, IGNORED),
        }
        real = self._stack([[1] * len(row["input_ids"]) for row in rows], length, 0)
        if not all("position_ids" in row for row in rows):
            return batch | {"attention_mask": real}
        positions = self._stack([row["position_ids"] for row in rows], length, 0)
        return batch | {"position_ids": positions, "attention_mask": _apart(positions)}

    def _stack(self, rows: Sequence[Sequence[int]], length: int, filler: int) -> torch.Tensor:
        def filled(row: Sequence[int]) -> list[int]:
            gap = [filler] * (length - len(row))
            return [*row, *gap] if self.side == "right" else [*gap, *row]

        return torch.tensor([filled(row) for row in rows])


def _apart(positions: torch.Tensor) -> torch.Tensor:
    """Additive mask `[batch, 1, length, length]` of rows in which every 0 of `[batch, length]` begins a pair.

    Filler begins one at each token, so that it sees itself alone, and no row of the mask is empty.
    """
    pair = (positions == 0).cumsum(1)
    same = pair[:, :, None] == pair[:, None, :]
    seen = same & torch.ones_like(same).tril()
    mask = torch.zeros(seen.shape, dtype=torch.float32)
    return mask.masked_fill_(~seen, torch.finfo(torch.float32).min)[:, None]


# Loss


def answer_tokens(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """How many tokens of a batch count in the loss of a causal model, 0-dim: those with a label, the first aside.

    Ranks whose answers differ in length have means over different numbers of tokens; `ddl.backward(loss,
    weight=answer_tokens(batch))` makes of them the mean over all.
    """
    return (batch["labels"][:, 1:] != IGNORED).sum()
