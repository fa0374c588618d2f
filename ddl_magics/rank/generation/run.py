"""Generates this rank's batches with transformers' own `generate`, and measures them.

Rows are padded on the left, hidden by the attention mask. Where ranks need one another in every forward (`synced`),
each has the same number of batches, and goes on with the forward until the last rank has its last token; a rank without
a prompt continues a single token that nobody reads.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank.generation.draws import OwnDraws, generator_of, warpers
from ddl_magics.rank.generation.stream import Steps, Text
from ddl_magics.strategies.common import bytes_by_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddl_magics.rank.generation.options import Options
    from ddl_magics.rank.generation.plan import Row

STAND_IN = -1
"""Number of the prompt of a rank that has none, and only takes part."""


@dataclass
class Made:
    """What one rank made, and how long it took; it travels to the others."""

    tokens: dict[int, list[list[int]]] = field(default_factory=dict)
    """By number of the prompt: one list for each text."""
    began: float = 0.0
    first_token: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens, of all batches."""
    cache: int = 0
    memory: int = 0
    seconds: float = 0.0


class Generator:
    """One rank at work.

    Parameters
    ----------
    module
        A model of transformers, ready to compute on this rank.
    synced
        Ranks need one another in every forward.
    say
        Gets each piece of text, see `stream`; None where nobody listens.
    """

    def __init__(
        self,
        module: Any,
        options: Options,
        *,
        seed: int,
        synced: bool,
        tokenizer: Any = None,
        say: Callable[[int, str, bool], object] | None = None,
    ) -> None:
        self.module = module
        self.options = options
        self.seed = seed
        self.synced = synced
        self.tokenizer = tokenizer
        self.say = say
        self.device = module.get_input_embeddings().weight.device

    def run(self, batches: list[list[Row]], made: Made) -> None:
        """Continue the rows of each batch; what comes of it goes into `made`."""
        with torch.no_grad(), evaluating(self.module):
            for rows in batches:
                self._batch(rows, made)

    def _batch(self, rows: list[Row], made: Made) -> None:
        tokens, mask = padded([row.tokens for row in rows], self.options.padding, self.device)
        watch = self._watch(rows)
        config = copy.copy(self.options.config)
        if rows[0].prompt == STAND_IN:
            config.max_new_tokens = 1  # then it is done, and takes part for as long as others are not
        with configured(self.module, config):
            output = self.module.generate(
                input_ids=tokens,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList(self._processors(rows, watch)),
                synced_gpus=self.synced,
                **self._more(watch),
            )
        if rows[0].prompt == STAND_IN:
            return
        self._measure(watch.times, output, made)
        each = len(output.sequences) // len(rows)  # a beam search gives several texts of one row
        for at, sequence in enumerate(output.sequences[:, tokens.shape[1] :].tolist()):
            made.tokens.setdefault(rows[at // each].prompt, []).append(self._cut(sequence))

    def _watch(self, rows: list[Row]) -> Steps:
        if self.say is None or self.options.beams > 1 or rows[0].prompt == STAND_IN:
            return Steps()
        texts = {at: (row.prompt, Text(self.tokenizer)) for at, row in enumerate(rows) if row.copy == 0}
        return Steps(self.options.ends, texts, self.say)

    def _more(self, watch: Steps) -> dict[str, Any]:
        """Arguments that transformers takes only where they have a use."""
        more: dict[str, Any] = {}
        if self.options.beams == 1:
            more["streamer"] = watch
        if self.options.config.stop_strings:
            more["tokenizer"] = self.tokenizer
        if "stopping_criteria" in self.options.objects:
            more["stopping_criteria"] = StoppingCriteriaList(self.options.objects["stopping_criteria"])
        return more

    def _processors(self, rows: list[Row], watch: Steps) -> Iterator[Any]:
        yield from self.options.objects.get("logits_processor", ())
        if self.options.beams > 1:
            yield Clock(watch.times)  # a beam search takes no streamer
        if self.options.sampling is not None:
            generators = [generator_of(self.seed, row.prompt, row.copy, self.device) for row in rows]
            yield OwnDraws(warpers(self.options.sampling, self.device), generators)

    def _measure(self, times: list[float], output: Any, made: Made) -> None:
        if times and not made.first_token:
            made.first_token = times[0] - made.began
        made.gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
        made.cache = max(made.cache, cache_bytes(output))

    def _cut(self, tokens: list[int]) -> list[int]:
        """Tokens of one text: up to the one that ends it, without the padding of a row that ended before others."""
        end = next((at for at, token in enumerate(tokens) if token in self.options.ends), None)
        if end is not None:
            return tokens[:end]
        last = len(tokens)
        while self.options.config.stop_strings and last and tokens[last - 1] == self.options.padding:
            last -= 1
        return tokens[:last]


class Clock(LogitsProcessor):
    """Notes when each step was, where transformers takes no streamer; changes nothing."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores as they are."""
        self._times.append(time.perf_counter())
        return scores


def padded(rows: list[list[int]], padding: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and attention mask `[rows, longest]`, filled up on the left."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[padding] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return tokens, mask


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode within; afterwards every part of the module is in the mode in which it was found."""
    trained = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in trained:
            part.training = True


@contextlib.contextmanager
def configured(module: torch.nn.Module, config: Any) -> Iterator[None]:
    """Make `config` the module's own within: transformers fills what is None in one that it is given from that.

    The parts of a module too, since adapters hand theirs on to the model that they wrap.
    """
    found = [(part, vars(part)["generation_config"]) for part in module.modules() if "generation_config" in vars(part)]
    for part, _ in found:
        part.generation_config = config
    try:
        yield
    finally:
        for part, own in found:
            part.generation_config = own


def cache_bytes(output: Any) -> int:
    """Bytes of the tensors of a cache that `generate` returned, whatever kind of cache it is."""
    cache = output["cache"] if "cache" in output else output.get("past_key_values")  # the name before transformers 5.24
    return bytes_by_kind(cache=_tensors(cache, 4))["cache"]


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Tensors in a value: its items, or its attributes, down to `depth`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth - 1)
    elif depth and hasattr(value, "__dict__"):
        yield from _tensors(vars(value), depth)


def require_generate(module: Any) -> None:
    """Raise UsageOnRankError for a module that transformers' `generate` does not belong to."""
    if not callable(getattr(module, "generate", None)) or getattr(module, "generation_config", None) is None:
        raise UsageOnRankError(
            f"{type(module).__name__} has no generate", "It takes a causal language model of transformers."
        )
