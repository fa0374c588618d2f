"""What a user may call prompts, read into lists of token numbers.

Texts, chats (lists of messages with `role` and `content`, by the tokenizer's template), token lists and tensors, and
what a tokenizer returns (`input_ids` with `attention_mask`). One of them alone counts as a list of one. Limits: text
only, no images or tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddl_magics.errors import UsageOnRankError

FORMS = "Give texts, chats (lists of messages with role and content), or lists of tokens."


def read(prompts: Any, tokenizer: Any) -> list[list[int]]:
    """Tokens of each prompt. Raises UsageOnRankError for what is no prompt, or empty, with its number."""
    given = _as_list(prompts)
    if not given:
        raise UsageOnRankError("There are no prompts", FORMS)
    tokens = [_tokens(prompt, number, tokenizer) for number, prompt in enumerate(given)]
    for number, prompt in enumerate(tokens):
        if not prompt:
            raise UsageOnRankError(f"Prompt {number} is empty: it has no tokens", "A model goes on from something.")
    return tokens


def check(tokens: list[list[int]], max_new_tokens: int, vocabulary: int | None, positions: int | None) -> None:
    """Raise UsageOnRankError for prompts that the model cannot take: what is in them, or how long they are.

    `vocabulary` and `positions`: how many the model has; None where it does not tell.
    """
    for number, prompt in enumerate(tokens):
        foreign = next((token for token in prompt if token < 0 or (vocabulary and token >= vocabulary)), None)
        if foreign is not None:
            raise UsageOnRankError(
                f"Prompt {number} has token {foreign}, and the model knows 0 to {(vocabulary or 0) - 1}",
                "Use the tokenizer that belongs to the model.",
            )
        if positions is not None and len(prompt) + max_new_tokens > positions:
            raise UsageOnRankError(
                f"Prompt {number} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, which is more than "
                f"the {positions} positions of the model",
                "Shorten the prompt, or ask for fewer tokens.",
            )


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, Mapping):
        return _rows(prompts)
    if isinstance(prompts, torch.Tensor):
        return [prompts] if prompts.dim() == 1 else list(prompts)
    if isinstance(prompts, str) or _is_chat(prompts) or _is_tokens(prompts):
        return [prompts]
    if isinstance(prompts, Sequence):
        return list(prompts)
    raise UsageOnRankError(f"{type(prompts).__name__} is no list of prompts", FORMS)


def _rows(encoded: Mapping[str, Any]) -> list[list[int]]:
    """Rows of what a tokenizer returned, without padding."""
    if "input_ids" not in encoded:
        raise UsageOnRankError(f"A dict with {', '.join(map(str, encoded)) or 'nothing'} is no prompt", FORMS)
    rows, masks = (
        value.tolist() if isinstance(value, torch.Tensor) else list(value)
        for value in (encoded["input_ids"], encoded.get("attention_mask", ()))
    )
    if rows and not isinstance(rows[0], Sequence):
        rows, masks = [rows], [masks] if masks else []
    masks = masks or [[1] * len(row) for row in rows]
    return [
        [token for token, kept in zip(row, mask, strict=True) if kept] for row, mask in zip(rows, masks, strict=True)
    ]


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(m, Mapping) and "role" in m for m in prompt)


def _is_tokens(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    )


def _tokens(prompt: Any, number: int, tokenizer: Any) -> list[int]:
    if isinstance(prompt, torch.Tensor) and prompt.dim() == 1 and not prompt.is_floating_point():
        return [int(token) for token in prompt.tolist()]
    if isinstance(prompt, list | tuple) and (not prompt or _is_tokens(prompt)):
        return list(prompt)
    if isinstance(prompt, str):
        return [int(token) for token in _required(tokenizer, "text")(prompt)["input_ids"]]
    if _is_chat(prompt):
        return _of_chat(prompt, number, _required(tokenizer, "a chat"))
    raise UsageOnRankError(f"Prompt {number} is a {type(prompt).__name__}, which is no prompt", FORMS)


def _required(tokenizer: Any, kind: str) -> Any:
    if tokenizer is None:
        raise UsageOnRankError(f"A prompt is {kind} and there is no tokenizer", "Give tokenizer=, that of the model.")
    return tokenizer


def _of_chat(messages: Any, number: int, tokenizer: Any) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise UsageOnRankError(
            f"Prompt {number} is a chat and this tokenizer has no chat template",
            "Use the tokenizer of an instruction-tuned model, or give a text.",
        )
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # of the template, which is a program of the model's author
        raise UsageOnRankError(
            f"The chat template cannot take prompt {number}: {error}", "Look at its roles and their order."
        ) from error
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
