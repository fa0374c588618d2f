"""Sampling in which each text has a random generator of its own.

What a prompt is continued with then depends on its seed, its number and its own tokens alone, not on the prompts beside
it, the size of the batch, or the number of ranks. Probabilities that differ in their last digits, as those of two
batches do, can still tip a draw that falls on the border of two tokens; generators of a CPU and of a GPU differ.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import LogitsProcessor, generation

if TYPE_CHECKING:
    from collections.abc import Sequence


def generator_of(seed: int, prompt: int, copy: int, device: torch.device) -> torch.Generator:
    """Generator of one text: the `copy`-th of a prompt, by its number among all prompts of the call."""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{copy}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)  # torch takes 63 bits


def warpers(sampling: dict[str, Any], device: torch.device) -> list[LogitsProcessor]:
    """Return the processors that transformers makes of sampling options, in its order."""
    wanted: list[tuple[bool, str, tuple[Any, ...], dict[str, Any]]] = [
        (sampling["temperature"] != 1.0, "TemperatureLogitsWarper", (float(sampling["temperature"]),), {}),
        (sampling["top_h"] is not None, "TopHLogitsWarper", (sampling["top_h"],), {}),
        (sampling["top_k"] != 0, "TopKLogitsWarper", (sampling["top_k"],), {}),
        (sampling["top_p"] < 1.0, "TopPLogitsWarper", (sampling["top_p"],), {}),
        (sampling["min_p"] is not None, "MinPLogitsWarper", (sampling["min_p"],), {}),
        (sampling["typical_p"] < 1.0, "TypicalLogitsWarper", (sampling["typical_p"],), {}),
        (0.0 < sampling["epsilon_cutoff"] < 1.0, "EpsilonLogitsWarper", (sampling["epsilon_cutoff"],), {}),
        (0.0 < sampling["eta_cutoff"] < 1.0, "EtaLogitsWarper", (sampling["eta_cutoff"],), {"device": device}),
    ]
    return [getattr(generation, name)(*values, **more) for used, name, values, more in wanted if used]


class OwnDraws(LogitsProcessor):
    """Draws a token for each row and leaves it as the only one that is possible, for the greedy choice that follows."""

    def __init__(self, warpers: Sequence[LogitsProcessor], generators: Sequence[torch.Generator]) -> None:
        self._warpers = warpers
        self._generators = generators

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `[rows, vocabulary]` in, the same shape out: 0 for the token that was drawn, -inf for the others."""
        for warp in self._warpers:
            scores = warp(input_ids, scores)
        probabilities = torch.softmax(scores.float(), dim=-1)
        drawn = [
            torch.multinomial(row, 1, generator=generator)
            for row, generator in zip(probabilities, self._generators, strict=True)
        ]
        only = torch.full_like(scores, float("-inf"))
        only.scatter_(1, torch.stack(drawn), 0.0)
        return cast("torch.FloatTensor", only)
