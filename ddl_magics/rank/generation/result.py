"""What `ddl.generate` returns: the texts as a list, with their tokens and with figures of how they came about.

Needs no torch: a notebook's kernel can hold it. Times in seconds, sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figures:
    """How one call went, over all ranks that took part."""

    strategy: str
    ranks: int
    prompts: int
    tokens: int
    """That are new, in all texts, without those that end a text."""
    seconds: float
    """From the call until every rank had all texts, on the slowest rank."""
    first_token: float
    """From the call to the first token, on the rank where that took longest."""
    between_tokens: float
    """Median over all steps after the first of each batch, on all ranks; 0 where there was none."""
    between_tokens_p95: float
    cache: int
    """Keys and values of attention that a rank held at the end of a batch, the most of any."""
    memory: int
    """What a rank had allocated at its peak in this cell, the most of any; weights and cache are in it."""
    gathered: str
    """How often sharded weights were gathered: `once` or `in every forward`; empty where they are not gathered."""
    seed: int | None
    """Draws the same texts again; None where nothing was drawn."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all ranks over the seconds of the call."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Generated(list[Any]):
    """Texts in the order of the prompts; token lists, where there was no tokenizer."""

    def __init__(self, texts: list[Any], tokens: list[list[int]], figures: Figures) -> None:
        super().__init__(texts)
        self.tokens = tokens
        """New tokens of each text, without the one that ends it."""
        self.figures = figures

    def report(self) -> str:
        """Give the figures as a short table."""
        found = self.figures
        gathered = f", weights gathered {found.gathered}" if found.gathered else ""
        rows = [
            ("tokens/s", f"{found.tokens_per_second:.1f}"),
            ("time to first token", _time(found.first_token)),
            ("between tokens", f"{_time(found.between_tokens)} (95 %: {_time(found.between_tokens_p95)})"),
            ("KV cache", f"{_size(found.cache)} a rank"),
            ("memory", f"{_size(found.memory)} a rank at the peak"),
        ]
        width = max(len(name) for name, _ in rows)
        where = f"{_count(found.ranks, 'rank')} under {found.strategy}{gathered}"
        title = f"{_count(len(self), 'text')}, {_count(found.tokens, 'new token')} in {found.seconds:.2f} s, {where}"
        return "\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows)])

    def __repr__(self) -> str:
        """Show the texts, and the figures below them: what a cell shows of its last line."""
        shown = [f"[{number}] {text}" for number, text in enumerate(self)]
        return "\n".join([*shown, self.report()])

    def __reduce__(self) -> tuple[Any, ...]:
        return Generated, (list(self), self.tokens, self.figures)


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
