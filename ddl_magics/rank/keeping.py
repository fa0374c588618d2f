"""The context's calls for weights and checkpoints: whole weights in and out, save, load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.rank import adapters, pretrained
from ddl_magics.rank.among import Among
from ddl_magics.rank.checkpoint import reading, saving
from ddl_magics.rank.checkpoint.talk import Talk
from ddl_magics.rank.model import training_of

if TYPE_CHECKING:
    import os
    from pathlib import Path


class Keeping(Among):
    """What is kept of a model."""

    def full_state_dict(self, model: Any) -> dict[str, torch.Tensor]:
        """Whole weights on the CPU, unprefixed names, before or after `prepare`; a collective."""
        training = training_of(model)
        return self._strategy().full_state_dict(model) if training is None else training.prepared.full_state_dict()

    def load_full_state_dict(self, model: Any, state: dict[str, torch.Tensor]) -> None:
        """Whole weights in, before or after `prepare`; a collective, every rank gives the same."""
        training = training_of(model)
        if training is None:
            self._strategy().load_full_state_dict(model, state)
        else:
            training.prepared.load_full_state_dict(state)

    def from_pretrained(
        self,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        dtype: torch.dtype | str | None = None,
        **config_overrides: Any,
    ) -> torch.nn.Module:
        """Load a causal language model of transformers for this cell's strategy; a collective.

        Each rank reads what it will hold: rows under `fsdp`, blocks under `axonn`, one parameter at a time under
        `zero:3`, everything under the others. Then make the optimizer, and call `prepare`. The model is in evaluation
        mode, as transformers gives it: call `model.train()` to train.

        Parameters
        ----------
        name
            A folder with config.json and safetensors, or a name of the hub.
        revision
            Of a name of the hub.
        dtype
            Of the weights; `auto`: as they were saved; None: what the precision of the cell asks for.
        config_overrides
            Settings of the model's configuration, such as `attention_dropout=0.1`.
        """
        default = torch.bfloat16 if self._request.precision == "bf16-true" else torch.float32
        wanted = pretrained.Wanted(str(name), revision, dtype, default, config_overrides)
        strategy = self._strategy()
        talk = Talk(alone=strategy.alone)
        return pretrained.load(wanted, strategy, talk, lambda: self.first(local=True), self.note)

    def save(
        self,
        path: str | os.PathLike[str],
        model: Any = None,
        *,
        tokenizer: Any = None,
        keep: int | None = None,
        **extra: Any,
    ) -> Path:
        """Save a prepared model with its optimizer, schedules, loaders and random state; a collective.

        Parameters
        ----------
        path
            The folder of the run. Each save is a new folder `step-N` in it, whole before anything tells of it.
        model
            Which, where several are prepared.
        tokenizer
            Saved beside the weights, so that `from_pretrained` finds both.
        keep
            How many checkpoints are left in `path`, the newest ones; None: all.
        extra
            Numbers, texts, tensors, and lists or dicts of them, which `load` gives back.

        Returns
        -------
        The folder of the checkpoint.
        """
        training = self._models.meant(model, "save", self._request.cell)
        talk = Talk(alone=training.prepared.strategy.alone)
        return saving.save(training, talk, path, tokenizer=tokenizer, keep=keep, extra=extra, note=self.note)

    def load(self, path: str | os.PathLike[str], model: Any = None, *, resume: str | None = None) -> reading.Loaded:
        """Load into a prepared model, under any strategy and on any number of ranks; a collective.

        Parameters
        ----------
        path
            The folder that `save` was given (its latest checkpoint), or returned, or any with `model.safetensors`.
        model
            Which, where several are prepared.
        resume
            `latest`: where there is no checkpoint yet, nothing happens and the step is 0.

        Returns
        -------
        What was saved beside: `step`, `epoch`, `extra`, and the `folder`. The loaders of the model's `prepare` go on
        where the training was in them.
        """
        training = self._models.meant(model, "load", self._request.cell)
        talk = Talk(alone=training.prepared.strategy.alone)
        loaded = reading.load(training, talk, path, resume, self.note)
        if loaded.folder is not None:
            self._losses[training] = self._loss_of(training)[0], training.batches
            self._step = max(self._step, training.batches)
        return loaded

    def save_adapter(self, path: str | os.PathLike[str], model: Any = None, adapter: str = "default") -> Path:
        """Save an adapter of the package peft by itself, as `PeftModel.from_pretrained` reads it; a collective.

        Parameters
        ----------
        path
            A folder for this adapter; what it holds of an adapter is replaced.
        model
            Which, where several are prepared.
        adapter
            Its name in the model.
        """
        training = self._models.meant(model, "save_adapter", self._request.cell)
        return adapters.save(training, Talk(alone=training.prepared.strategy.alone), path, adapter)

    def load_adapter(self, path: str | os.PathLike[str], model: Any = None, adapter: str = "default") -> None:
        """Load a saved adapter into a prepared model that was made with one like it; a collective."""
        training = self._models.meant(model, "load_adapter", self._request.cell)
        for sentence in adapters.load(training, Talk(alone=training.prepared.strategy.alone), path, adapter):
            self.note(sentence)
