"""Activation checkpointing: each block of a model keeps its inputs alone, and computes the rest again in the backward.

Chen et al. 2016 (arXiv:1604.06174), by `torch.utils.checkpoint` in its form without reentrance, which composes with
the hooks of DDP, DeepSpeed, FSDP2 and AxoNN because it runs the block itself again, inside whatever a strategy hangs
on it. Models of transformers switch on their own, which knows what a layer must not do twice (fill its cache); in
others the blocks are those members of a `ModuleList` or `Sequential` that are of one class and made of modules.
Limits: models of transformers recompute in training mode only; what is no repeated block, such as a large head, keeps
its activations.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Undo = Callable[[], None]


class Recomputation:
    """What was done to one module, until `undo`: parameters, buffers and their names stay as they are."""

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        parts = list(_repeated(module))
        models = [part for part in parts if _knows_how(part)]
        blocks = [part for part in parts if not _knows_how(part)]
        self._undo: list[Undo] = [*map(_switch_on, models), *map(_wrap, blocks)]
        self._in_eval = any(not model.training for model in models)

    def notes(self) -> list[str]:
        """Sentences for the user about what could not be done."""
        if not self._undo:
            return [f"Activation checkpointing finds no repeated blocks in this {self._name}, which keeps them all."]
        if self._in_eval:  # as `from_pretrained` leaves it
            return [f"This {self._name} is in eval mode, in which it keeps all activations: call model.train()."]
        return []

    def undo(self) -> None:
        """Let the module keep its activations again; safe to call twice."""
        while self._undo:
            self._undo.pop()()


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Outermost parts to compute again: models of transformers, and repeated blocks of the rest."""
    if _knows_how(module):
        yield module
        return
    blocks = set(_blocks(module)) if isinstance(module, nn.ModuleList | nn.Sequential) else set()
    for child in module.children():
        if child in blocks:
            yield child
        else:
            yield from _repeated(child)


def does_it_itself(module: nn.Module) -> bool:
    """Whether a module of transformers computes its activations again, by our doing or the user's."""
    return bool(getattr(module, "gradient_checkpointing", False))


def _knows_how(module: nn.Module) -> bool:
    return bool(getattr(type(module), "supports_gradient_checkpointing", False))


def _blocks(members: nn.ModuleList | nn.Sequential) -> Iterator[nn.Module]:
    """Members that share their class with another, and hold more than the one tensor that would be kept anyway."""
    made_of_modules = [member for member in members if next(member.children(), None) is not None]
    kinds = Counter(type(member) for member in made_of_modules)
    return (member for member in made_of_modules if kinds[type(member)] > 1 and not _knows_how(member))


def _switch_on(model: Any) -> Undo:
    """Let a model of transformers do it in its own way, unless the user has switched that on already."""
    if any(map(does_it_itself, model.modules())):
        return lambda: None
    ours = not getattr(model, "_require_grads_hooks", None)
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # since transformers 5.20
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
        switch_off = model.activation_checkpointing_disable
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        switch_off = model.gradient_checkpointing_disable
    if ours:  # gradients of the embeddings' output, which only the other form of checkpointing needs
        model.disable_input_require_grads()
    return switch_off  # type: ignore[no-any-return]


def _wrap(block: nn.Module) -> Undo:
    """Give a block a forward that computes again. An attribute of its own, which a copy of the model copies too."""
    before = vars(block).get("forward")
    block.forward = functools.partial(_forward, block.forward)

    def undo() -> None:
        if before is None:
            del block.forward
        else:
            block.forward = before

    return undo


def _forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
