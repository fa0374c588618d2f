"""One call of `ddl.generate`, from what the user gave to what every rank gets."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank import together
from ddl_magics.rank.generation import options as asked
from ddl_magics.rank.generation import prompts as given
from ddl_magics.rank.generation.plan import Agreed, Row, Share, agree
from ddl_magics.rank.generation.result import Figures, Generated
from ddl_magics.rank.generation.run import STAND_IN, Generator, Made, require_generate
from ddl_magics.rank.generation.stream import Printed

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from ddl_magics.rank.training import Training
    from ddl_magics.strategies.base import Strategy

PLAIN = (bool, int, float, str)
"""Types of options that are compared between ranks; objects have other addresses on each."""

ROOM = 2.0
"""Whole weights are gathered where this many times their size is free: the cache and activations need room too."""


@dataclass(frozen=True)
class Target:
    """A model as it is on this rank, prepared or not."""

    module: Any
    training: Training | None
    strategy: Strategy
    """Of the model; of the cell, where the model is not prepared."""

    @property
    def sharded(self) -> bool:
        """Ranks need one another in every forward."""
        return self.training is not None and self.training.prepared.sync_generate()

    @property
    def can_be_whole(self) -> bool:
        """Its shards can be gathered once."""
        return self.training is not None and self.training.prepared.can_be_whole

    def whole_bytes(self) -> int:
        """Size of the whole weights."""
        sizes = {id(p): getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.module.parameters()}
        return sum(sizes.values())

    def autocast(self) -> AbstractContextManager[Any]:
        """What the precision of its `prepare` asks for."""
        return nullcontext() if self.training is None else self.training.autocast()

    def inference(self, *, whole: bool) -> AbstractContextManager[None]:
        """What its forwards run in."""
        if self.training is None:
            return self.strategy.inference(self.module)
        self.training.require_whole()
        return self.training.prepared.inference(whole=whole)


@dataclass(frozen=True)
class Call:
    """What `ddl.generate` was given beside the model; see there."""

    prompts: Any
    max_new_tokens: int = 64
    tokenizer: Any = None
    batch_size: int | None = None
    stream: bool | Callable[[int, str, bool], object] = False
    seed: int | None = None
    gather: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Of transformers."""

    @classmethod
    def of(cls, prompts: Any, given: dict[str, Any]) -> Call:
        """Tell our own arguments from the options of transformers."""
        own = {one.name for one in fields(cls)} - {"prompts", "options"}
        options = {name: value for name, value in given.items() if name not in own}
        return cls(prompts, options=options, **{name: given[name] for name in own & set(given)})


@dataclass(frozen=True)
class Read:
    """What was given, checked."""

    tokens: list[list[int]]
    options: asked.Options


def generate(
    target: Target, share: Share, call: Call, free: Callable[[], int], peak_memory: Callable[[], int]
) -> Generated:
    """Continue the prompts; a collective of the ranks of `share`, each of which gets all texts.

    `free`: bytes that this rank could allocate now. `peak_memory`: bytes that it had at its peak.
    """
    made = Made(began=time.perf_counter())
    found: list[Read] = []

    def read() -> Any:
        found.append(_read(target, call))
        plain = {name: value if isinstance(value, PLAIN) else "" for name, value in call.options.items()}
        own = [call.max_new_tokens, call.batch_size, call.gather, call.seed]
        return [found[0].tokens, *own, repr(sorted(plain.items()))]

    _, agreed = agree(
        share,
        read,
        call.seed,
        draws=lambda: found[0].options.sampling is not None,
        fits=lambda: free() >= ROOM * target.whole_bytes(),
    )
    tokens, options = found[0].tokens, found[0].options
    whole = target.can_be_whole and (agreed.whole if call.gather is None else call.gather)
    synced = target.sharded and not whole
    batches = list(share.batches(tokens, options.rows, call.batch_size))
    if synced:
        stand_in = [Row(STAND_IN, 0, tokens[0][:1])]
        batches += [stand_in] * (share.turns(len(tokens), call.batch_size) - len(batches))
    with target.inference(whole=whole), target.autocast():
        generator = Generator(
            target.module,
            options,
            seed=agreed.seed,
            synced=synced,
            tokenizer=call.tokenizer,
            say=_listener(call, len(tokens)),
        )
        generator.run(batches, made)
        made.memory = peak_memory()  # before weights that were gathered go
    made.seconds = time.perf_counter() - made.began
    of_all = [made] if share.size == 1 else together.all_gather(made)
    gathered = "" if not target.can_be_whole else "once" if whole else "in every forward"
    return _together(of_all, target, share, call, options, agreed, gathered)


def _read(target: Target, call: Call) -> Read:
    require_generate(target.module)
    _check(call)
    if call.gather and target.sharded and not target.can_be_whole:
        raise UsageOnRankError(
            f"{target.strategy.spec.text} computes with all its ranks, and gathers nothing", "Leave gather away."
        )
    if call.stream and call.tokenizer is None:
        raise UsageOnRankError("stream needs a tokenizer", "Give tokenizer=, that of the model.")
    tokens = given.read(call.prompts, call.tokenizer)
    options = asked.read(target.module, call.tokenizer, call.max_new_tokens, call.options)
    embedding = target.module.get_input_embeddings()
    positions = getattr(target.module.config, "max_position_embeddings", None)
    given.check(tokens, call.max_new_tokens, getattr(embedding, "num_embeddings", None), positions)
    return Read(tokens, options)


def _check(call: Call) -> None:
    """Raise UsageOnRankError for an argument of another kind than it must be."""
    if call.batch_size is not None and (not _whole_number(call.batch_size) or call.batch_size < 1):
        raise UsageOnRankError(f"batch_size={call.batch_size!r} cannot be", "Give a number of prompts, 1 or more.")
    if call.seed is not None and not _whole_number(call.seed):
        raise UsageOnRankError(f"seed={call.seed!r} cannot be", "Give a whole number.")
    if call.gather not in (None, True, False):
        raise UsageOnRankError(f"gather={call.gather!r} cannot be", "Give True or False, or leave it away.")
    if not isinstance(call.stream, bool) and not callable(call.stream):
        remedy = "Give True, or a function of a prompt's number, a piece of text, and whether it is the last."
        raise UsageOnRankError(f"stream={call.stream!r} cannot be", remedy)
    if call.tokenizer is not None and not callable(getattr(call.tokenizer, "decode", None)):
        kind = type(call.tokenizer).__name__
        raise UsageOnRankError(f"tokenizer= was given a {kind}", "Give AutoTokenizer.from_pretrained(name).")


def _whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listener(call: Call, count: int) -> Callable[[int, str, bool], object] | None:
    if not call.stream:
        return None
    return Printed(several=count > 1) if call.stream is True else call.stream


def _together(
    of_all: list[Made],
    target: Target,
    share: Share,
    call: Call,
    options: asked.Options,
    agreed: Agreed,
    gathered: str,
) -> Generated:
    by_prompt: dict[int, list[list[int]]] = {}
    for one in of_all:
        by_prompt |= one.tokens
    tokens = [text for number in sorted(by_prompt) for text in by_prompt[number]]
    gaps = sorted(gap for one in of_all for gap in one.gaps)
    figures = Figures(
        strategy=target.strategy.spec.text,
        ranks=share.size,
        prompts=len(by_prompt),
        tokens=sum(map(len, tokens)),
        seconds=max(one.seconds for one in of_all),
        first_token=max(one.first_token for one in of_all),
        between_tokens=statistics.median(gaps) if gaps else 0.0,
        between_tokens_p95=gaps[math.ceil(0.95 * len(gaps)) - 1] if gaps else 0.0,
        cache=max(one.cache for one in of_all),
        memory=max(one.memory for one in of_all),
        gathered=gathered,
        seed=agreed.seed if options.sampling is not None else None,
    )
    texts: list[Any] = tokens if call.tokenizer is None else [_text(call.tokenizer, text) for text in tokens]
    return Generated(texts, tokens, figures)


def _text(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
