"""Parameters that DeepSpeed shards (ZeRO stage 3), whole on every rank for as long as many forwards need them.

An engine gathers layer by layer and frees after each, in every forward: text that is generated would bring all weights
over the network for each token. `whole` gathers once, and sets the engine's hooks aside meanwhile: they would gather,
free, compare the order of modules with the other ranks, and cost more time than a small model's forward itself.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch.utils.hooks import RemovableHandle


@contextmanager
def whole(module: torch.nn.Module, engine: Any = None) -> Iterator[None]:
    """Within it every parameter of `module` is whole on this rank, under no_grad only.

    Entering is a collective; memory: the whole model. `engine` is the one that has the module, None where none has.
    """
    from deepspeed import zero

    with zero.GatheredParameters(list(module.parameters())):
        if engine is None:
            yield
            return
        owner = getattr(engine.optimizer, "parameter_offload", engine.optimizer)  # the latter without an optimizer
        with set_aside([*owner.forward_hooks, *owner.backward_hooks, owner.fwd_pre_hook]):
            yield


@contextmanager
def set_aside(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Take hooks off their modules, and put them back in their places among the hooks of others."""
    before: list[tuple[Any, list[tuple[int, Any]]]] = []
    seen: set[int] = set()
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is None or handle.id not in hooks:
            continue
        if id(hooks) not in seen:
            seen.add(id(hooks))
            before.append((hooks, list(hooks.items())))
        del hooks[handle.id]
    try:
        yield
    finally:
        for hooks, items in before:
            hooks.clear()
            hooks.update(items)
