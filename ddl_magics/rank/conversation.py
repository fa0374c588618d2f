"""A chat with a model on the ranks: what was said so far, and the next answer.

Every rank keeps the messages, and makes each answer by `ddl.generate`; rank 0 tells the notebook of it as it comes. A
chat does not keep its model alive. Limits: one chat at a time, the last that was opened; the whole chat is read again
for each answer; what no longer fits into the model's positions is forgotten from the beginning, a question with its
answer.
"""

from __future__ import annotations

import weakref
from threading import Event
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank.generation import prompts

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.rank.generation.result import Generated

Message = dict[str, str]
"""`role` and `content`, as chat templates take them."""


class Conversation:
    """One chat.

    Parameters
    ----------
    key
        Names it, the same on all ranks.
    model, tokenizer
        As for `ddl.generate`.
    system
        What the model is told before all else; None for what its template says.
    options
        Of `ddl.generate`.
    """

    def __init__(
        self,
        key: str,
        model: Any,
        tokenizer: Any,
        system: str | None,
        options: dict[str, Any],
        positions: int | None,
    ) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise UsageOnRankError(
                "This tokenizer has no chat template", "Use an instruction-tuned model, or ddl.generate for texts."
            )
        self.key = key
        self.tokenizer = tokenizer
        self.hushed = Event()
        """The user wants no more of the answer that is under way; set from any thread."""
        self._model = weakref.ref(model)
        self._positions = positions
        self._options = options
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = []

    def clear(self) -> None:
        """Forget what was said."""
        self.messages.clear()

    def answer(self, text: str, generate: Callable[..., Generated], write: Callable[[str], object] | None) -> Generated:
        """Answer a message; nothing is kept of one that fails.

        Parameters
        ----------
        generate
            `ddl.generate`.
        write
            Gets the answer in pieces, on the rank that shows it; None on others.
        """
        from ddl_magics.rank.generation.stream import Printed

        model = self._model()
        if model is None:
            raise UsageOnRankError(
                "The model of this chat is gone: its variable has another value by now",
                "Call ddl.chat again.",
            )
        said = self._fitting([*self.messages, {"role": "user", "content": text}])
        self.hushed.clear()
        made = generate(
            model,
            [[*self._system, *said]],
            tokenizer=self.tokenizer,
            stream=Printed(several=False, write=write or _nowhere),
            stopping_criteria=[self._hush],
            **self._options,
        )
        self.messages = [*said, {"role": "assistant", "content": str(made[0])}]
        return made

    def _fitting(self, messages: list[Message]) -> list[Message]:
        """The last messages that leave room for an answer."""
        room = None if self._positions is None else self._positions - self._options["max_new_tokens"]
        while room is not None and len(messages) > 1 and self._length(messages) > room:
            messages = messages[2:]
        return messages

    def _length(self, messages: list[Message]) -> int:
        return len(prompts.read([[*self._system, *messages]], self.tokenizer)[0])

    def _hush(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """As a stopping criterion of transformers: whether each row `[rows]` is to end."""
        import torch

        return torch.full((input_ids.shape[0],), self.hushed.is_set(), dtype=torch.bool, device=input_ids.device)


def _nowhere(text: str) -> None:
    """Where nobody reads."""
