"""The tokens of a batch as they come: when each step was, and the text of each row piece by piece.

`Steps` is what transformers calls a streamer. Text is handed on only when it can no longer change: a character may be
several tokens, and the last word of a line may become another with the next token's bytes.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

Say = "Callable[[int, str, bool], object]"
"""Called with the number of a text, its next piece, and whether that is the last one."""

PRINTED_S = 0.1
"""Seconds between two pieces that are printed: a message each, and people read no faster."""

UNFINISHED = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character yet."""


class Text:
    """Tokens in, pieces of text out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._begin = 0
        """First token that is decoded: some of what was said already, since a piece may depend on what is before it."""
        self._said = 0

    def add(self, token: int) -> str:
        """Text that is certain now, beyond what was given before; often a word, sometimes nothing."""
        self._tokens.append(token)
        return self._next(final=False)

    def end(self) -> str:
        """Give the rest, as it is."""
        return self._next(final=True)

    def _next(self, *, final: bool) -> str:
        before = self._decode(self._tokens[self._begin : self._said])
        now = self._decode(self._tokens[self._begin :])
        if (now.endswith(UNFINISHED) and not final) or len(now) <= len(before):
            return ""
        self._begin, self._said = self._said, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


class Steps(BaseStreamer):
    """When each step of a batch was done, and what its rows say.

    Parameters
    ----------
    ends
        Tokens that end a row.
    texts, say
        For each row of which every piece is wanted: its number, and its tokens as text. `say` gets the pieces.
    """

    def __init__(
        self,
        ends: frozenset[int] = frozenset(),
        texts: dict[int, tuple[int, Text]] | None = None,
        say: Callable[[int, str, bool], object] | None = None,
    ) -> None:
        self.times: list[float] = []
        """`time.perf_counter` of each step."""
        self._ends = ends
        self._open = dict(texts or {})
        self._say = say
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts, at first, and then a token for each row."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        if self._open:
            self._tell(value.tolist())

    def _tell(self, tokens: list[int]) -> None:
        assert self._say is not None
        for row, (number, text) in list(self._open.items()):
            if tokens[row] in self._ends:
                del self._open[row]
                self._say(number, text.end(), True)
            elif piece := text.add(tokens[row]):
                self._say(number, piece, False)

    def end(self) -> None:
        """Say what is left of rows that no token has ended."""
        while self._open:
            _, (number, text) = self._open.popitem()
            assert self._say is not None
            self._say(number, text.end(), True)


class Printed:
    """Prints texts as they come: the first one piece by piece, then each other one whole, in the order they ended.

    `several`: of more than one prompt; each text then says its number.
    """

    def __init__(self, *, several: bool, write: Callable[[str], object] | None = None) -> None:
        self._several = several
        self._write = write or _to_stdout
        self._first: int | None = None
        self._ended: set[int] = set()
        self._pieces: dict[int, str] = {}
        self._printed_at = 0.0

    def __call__(self, number: int, piece: str, last: bool) -> None:
        if self._first is None:
            self._first = number
            self._write(self._title(number))
        self._pieces[number] = self._pieces.get(number, "") + piece
        if last:
            self._ended.add(number)
        self._print_first(last=number == self._first and last)
        if self._first in self._ended:  # others wait until the line is free
            for other in sorted(self._ended & set(self._pieces)):
                self._write(f"{self._title(other)}{self._pieces.pop(other)}\n")

    def _print_first(self, *, last: bool) -> None:
        first = self._first
        if first not in self._pieces:
            return
        assert first is not None
        now = time.monotonic()
        if last:
            self._write(self._pieces.pop(first) + "\n")
        elif now - self._printed_at >= PRINTED_S:
            self._printed_at = now
            self._write(self._pieces[first])
            self._pieces[first] = ""

    def _title(self, number: int) -> str:
        return f"prompt {number}: " if self._several else ""


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
