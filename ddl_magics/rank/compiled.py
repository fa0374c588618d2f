"""A model that the user has compiled, by `torch.compile(model)` or `model.compile()`, made ready for a strategy.

`torch.compile(model)` wraps the module in another one, whose names and class are not the model's; here it becomes the
module itself, compiled in place with the same options. Compilation happens at the first call, so a strategy may still
lay its hooks and shard. Limits: under a strategy that does not compile (`Strategy.not_compiled`) the model runs as it
is; a part that the user wrapped by `torch.compile(part)` inside a model is left as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def in_place(model: Any) -> torch.nn.Module:
    """The module behind `torch.compile(model)`, compiled itself; any other module as it is."""
    if "_orig_mod" not in model._modules or "dynamo_ctx" not in vars(model):
        return model  # type: ignore[no-any-return]
    module = model._orig_mod
    module._compiled_call_impl = model.dynamo_ctx(module._call_impl)  # as Module.compile does
    return module  # type: ignore[no-any-return]


def leave_out(model: torch.nn.Module) -> bool:
    """Let a model and all its parts run uncompiled from now on; whether any was compiled."""
    compiled = [part for part in model.modules() if part._compiled_call_impl is not None]
    for part in compiled:
        part._compiled_call_impl = None
    return bool(compiled)
