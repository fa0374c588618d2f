"""Parameters that DeepSpeed shards (ZeRO stage 3), whole on every rank for as long as many forwards need them.

An engine gathers layer by layer and frees after each, in every forward: text that is generated would bring all weights
over the network for each token. `whole` gathers once. The engine's hooks stay on the module and do nothing meanwhile;
they would gather, free, and compare the order of modules with the other ranks at each forward.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


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
        hooks = getattr(engine.optimizer, "parameter_offload", engine.optimizer)  # the latter without an optimizer
        with _quiet(hooks):
            yield


@contextmanager
def _quiet(hooks: Any) -> Iterator[None]:
    """Put functions that do nothing in the place of those that the hooks call, on these objects alone."""
    from deepspeed.runtime.zero import parameter_offload

    instead: list[tuple[Any, str, Any]] = [
        (hooks, "pre_sub_module_forward_function", parameter_offload.FWD_MODULE_STACK.append),  # the hook after pops
        (hooks, "post_sub_module_forward_function", _nothing),
        (hooks.get_param_coordinator(), "reset_step", _nothing),
    ]
    for thing, name, function in instead:
        setattr(thing, name, function)
    try:
        yield
    finally:
        for thing, name, _ in instead:
            delattr(thing, name)


def _nothing(*_: Any) -> None:
    """Do nothing, whatever is given."""
