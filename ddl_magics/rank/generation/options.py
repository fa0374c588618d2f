"""What may be asked of transformers' `generate`, checked before any rank works: its own words, its own defaults.

Sampling is taken out of transformers' hands: it draws the rows of a batch from one generator, so that a text would
depend on its neighbours and on how many ranks there are. `draws` does it instead, after the same processors of the same
options.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import UsageOnRankError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Options that shape the distribution, with transformers' defaults."""

OBJECTS = ("logits_processor", "stopping_criteria")
"""Options that transformers takes beside its configuration, as lists of objects."""

OURS = frozenset(
    {
        "max_length",
        "return_dict_in_generate",
        "output_scores",
        "output_logits",
        "output_attentions",
        "output_hidden_states",
    }
)
"""Options of transformers that `ddl.generate` decides itself."""


@dataclass(frozen=True)
class Options:
    """What one call asks for."""

    config: Any
    """transformers' GenerationConfig; it never samples."""
    sampling: dict[str, Any] | None
    """Values of SAMPLING; None where the most probable token is taken."""
    beams: int
    copies: int
    """Texts for each prompt."""
    ends: frozenset[int]
    """Tokens that end a text."""
    padding: int
    objects: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of a batch for each prompt: texts that are sampled are rows of their own, those of a beam search not."""
        return self.copies if self.sampling is not None else 1


def read(module: Any, tokenizer: Any, max_new_tokens: int, given: dict[str, Any]) -> Options:
    """Options of a call over those of the model.

    Raises
    ------
    UsageOnRankError
        An option that does not exist, that transformers refuses, or that is not for `ddl.generate`.
    """
    _check_count(max_new_tokens)
    given = dict(given)
    objects = {name: given.pop(name) for name in OBJECTS if given.get(name)}
    config = copy.deepcopy(given.pop("generation_config", None) or module.generation_config)
    _check_names(config, given)
    _decide_sampling(given)
    with _refusals():
        config.update(**given, max_new_tokens=max_new_tokens, return_dict_in_generate=True)
    config.max_length = None
    sampling = None
    if config.do_sample:
        sampling = {name: _or_default(config, name, default) for name, default in SAMPLING.items()}
        _check_sampling(sampling, config)
    config.do_sample = False
    for name in SAMPLING:
        setattr(config, name, None)  # transformers warns of those that it does not use
    copies = config.num_return_sequences or 1
    if copies > 1 and sampling is not None:
        config.num_return_sequences = 1  # each is a row of its own, see `plan`
    with _refusals():
        config.validate()
    if config.stop_strings and tokenizer is None:
        raise UsageOnRankError("stop_strings need a tokenizer", "Give tokenizer=, that of the model.")
    ends = _ends(config, tokenizer)
    config.pad_token_id = _padding(config, tokenizer, ends)
    return Options(config, sampling, config.num_beams or 1, copies, ends, config.pad_token_id, objects)


def _check_count(max_new_tokens: Any) -> None:
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise UsageOnRankError(f"max_new_tokens={max_new_tokens!r} cannot be", "Give a whole number, 1 or more.")


def _check_names(config: Any, given: dict[str, Any]) -> None:
    known = [name for name in vars(config) if not name.startswith("_")] + list(SAMPLING)
    for name in given:
        if name in OURS:
            raise UsageOnRankError(
                f"generate decides {name} itself", "Call model.generate for all that transformers has."
            )
        if name not in known:
            raise UsageOnRankError(f"generate has no option {name!r}", nearest(name, known))


def _decide_sampling(given: dict[str, Any]) -> None:
    """Who names a temperature wants to sample; temperature 0 means the most probable token."""
    if given.get("temperature") == 0:
        given["do_sample"] = False
        del given["temperature"]
    elif "do_sample" not in given and any(given.get(name) is not None for name in SAMPLING):
        given["do_sample"] = True


def _or_default(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def _check_sampling(sampling: dict[str, Any], config: Any) -> None:
    if (config.num_beams or 1) > 1:
        raise UsageOnRankError(
            "Beams that are sampled draw from one generator for all prompts of a rank",
            "Sample with num_beams=1, or search with do_sample=False.",
        )
    checks = {
        "temperature": sampling["temperature"] > 0,
        "top_p": 0 < sampling["top_p"] <= 1,
        "top_k": sampling["top_k"] >= 0,
    }
    for name, holds in checks.items():
        if not holds:
            raise UsageOnRankError(f"{name}={sampling[name]!r} cannot be", "See transformers' GenerationConfig.")


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What transformers says of options that do not go together, in one line."""
    try:
        yield
    except (TypeError, ValueError) as error:
        first = str(error).splitlines()[0].rstrip(".")
        raise UsageOnRankError(f"transformers refuses these options: {first}") from None


def _ends(config: Any, tokenizer: Any) -> frozenset[int]:
    given = config.eos_token_id
    if given is None:
        given = config.eos_token_id = getattr(tokenizer, "eos_token_id", None)
    if given is None:
        return frozenset()
    return frozenset(map(int, given)) if isinstance(given, list | tuple) else frozenset({int(given)})


def _padding(config: Any, tokenizer: Any, ends: frozenset[int]) -> int:
    """A token to fill rows with; the mask hides it, so that any does."""
    for known in (config.pad_token_id, getattr(tokenizer, "pad_token_id", None), *sorted(ends)):
        if known is not None:
            return int(known)
    return 0
