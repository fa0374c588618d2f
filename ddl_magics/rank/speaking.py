"""The context's calls for text: generate and chat; `generation` does them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank.model import training_of
from ddl_magics.rank.scope import Scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.rank.conversation import Conversation
    from ddl_magics.rank.generation.call import Target
    from ddl_magics.rank.generation.plan import Share
    from ddl_magics.rank.generation.result import Generated


class Speaking(Scope):
    """What a language model says."""

    _chat: Conversation | None = None
    """The chat that was opened last."""

    def generate(
        self,
        model: Any,
        prompts: Any,
        *,
        max_new_tokens: int = 64,
        tokenizer: Any = None,
        batch_size: int | None = None,
        stream: bool | Callable[[int, str, bool], object] = False,
        seed: int | None = None,
        gather: bool | None = None,
        **sampling: Any,
    ) -> Generated:
        """Continue prompts with a causal language model of transformers, split over the ranks; a collective.

        Parameters
        ----------
        model
            Prepared, or whole on every rank.
        prompts
            Texts, chats (lists of messages with `role` and `content`), lists or tensors of tokens, or what a tokenizer
            returns. Every rank gives the same.
        max_new_tokens
            Of each text; it ends earlier where the model says so.
        tokenizer
            Of the model; without one prompts are tokens, and so is what comes back.
        batch_size
            Prompts that a rank continues at a time; None for all of its share.
        stream
            Print the first text of each rank as it comes, and others when they end; or a function that is called with
            the number of a prompt, the next piece of its text, and whether it is the last.
        seed
            Of what is drawn, one generator a text: the same texts on any number of ranks under any strategy. None takes
            the next number of torch's generator on rank 0.
        gather
            Whether zero:3 and fsdp gather the weights once and not for every token; None where the memory is there.
        sampling
            Options of transformers' `generate`, such as `temperature`, `top_p`, `num_beams`, `stop_strings`. Who names
            one that shapes the distribution gets `do_sample=True`.

        Returns
        -------
        A list of the texts in the order of the prompts, on every rank, with `.tokens`, `.figures` and `.report()`.

        Raises
        ------
        UsageOnRankError
            On all ranks alike, for prompts or options that cannot be.
        """
        made = self._generate(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            tokenizer=tokenizer,
            batch_size=batch_size,
            stream=stream,
            seed=seed,
            gather=gather,
            **sampling,
        )
        self._record("tokens/s", made.figures.tokens_per_second)
        self._record("first token (s)", made.figures.first_token)
        return made

    def chat(
        self, model: Any, tokenizer: Any, system: str | None = None, *, max_new_tokens: int = 256, **options: Any
    ) -> None:
        """Open a chat with an instruction-tuned model: a box in the notebook, a prompt in a program.

        Parameters
        ----------
        model, tokenizer
            As for `generate`. The chat does not keep the model alive.
        system
            What the model is told before all else; None for what its chat template says.
        max_new_tokens, options
            Of each answer, as for `generate`.
        """
        from ddl_magics.rank import channel
        from ddl_magics.rank.conversation import Conversation

        target, _ = self._speaker(model)
        decided = sorted({"stream", "batch_size", "tokenizer", "prompts"} & set(options))
        if decided:
            raise UsageOnRankError(f"chat decides {decided[0]} itself", "Leave it away.")
        positions = getattr(getattr(target.module, "config", None), "max_position_embeddings", None)
        options["max_new_tokens"] = max_new_tokens
        self._chat = Conversation(self._request.run, model, tokenizer, system, options, positions)
        opened = {"chat": self._chat.key, "model": type(target.module).__name__, "strategy": target.strategy.spec.text}
        if channel.notebook():
            channel.tell(opened, on=self.rank)
        else:
            channel.converse(self._chat, self._generate, self.rank)

    def reply(self, text: str | None, chat: str) -> None:
        """Answer a message of the open chat, None to forget what was said; what the notebook's chat runs here."""
        from ddl_magics.rank import channel

        if self._chat is None or self._chat.key != chat:
            raise UsageOnRankError("This chat is not open any more", "Call ddl.chat again.")
        if text is None:
            self._chat.clear()
            return
        made = self._chat.answer(text, self._generate, lambda piece: channel.tell({"chat": chat, "text": piece}))
        told = f"{made.figures.tokens} tokens, {made.figures.tokens_per_second:.1f} tokens/s"
        channel.tell({"chat": chat, "figures": told}, on=self.rank)

    def hush(self) -> None:
        """Let the answer of the open chat that is under way end with its next token; from any thread."""
        if self._chat is not None:
            self._chat.hushed.set()

    def _generate(self, model: Any, prompts: Any, **given: Any) -> Generated:
        """As `generate`, without a trace on the panel."""
        from ddl_magics.rank.generation.call import Call, generate

        target, share = self._speaker(model)
        return generate(
            target,
            share,
            Call.of(prompts, given),
            free=lambda: self.hardware.free() // (self.world.local_world_size if self.world.device == "cpu" else 1),
            peak_memory=lambda: self._memory.peak()["total"],
        )

    def _record(self, name: str, value: float) -> None:
        """On the panel, each call a step."""
        self._logged[name] = self._logged.get(name, 0) + 1
        self.recorder.record(name, self._logged[name], value)

    def _speaker(self, model: Any) -> tuple[Target, Share]:
        """The model, and which part of the prompts is this rank's."""
        from ddl_magics.rank.generation.call import Target
        from ddl_magics.rank.generation.plan import Share

        training = training_of(model)
        if training is None:
            target = Target(model, None, self._strategy())
        else:
            target = Target(training.prepared.module, training, training.prepared.strategy)
        strategy = target.strategy
        if self._alone and target.sharded:
            raise UsageOnRankError(
                f"This {type(target.module).__name__} is spread over the ranks by {strategy.spec.text}",
                "Run the cell without --strategy single.",
            )
        if self._alone or strategy.alone:
            return target, Share(0, 1)
        ranks = self._request.ranks
        if ranks is not None and len(ranks) < self.world.world_size:
            raise UsageOnRankError(
                f"generate puts the texts of all ranks together, and this cell runs on {len(ranks)} of them",
                "Run it without --ranks.",
            )
        return target, Share(strategy.data_rank, strategy.data_size)
