"""Whole weights out of a module that has them whole, and into it; and whether given ones fit, for any strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ddl_magics.errors import UsageOnRankError

if TYPE_CHECKING:
    from collections.abc import Mapping

SHOWN = 3
"""Names of a kind in a message."""


def full_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a whole module's weights and persistent buffers on the CPU; tied names share one copy."""
    copies: dict[int, torch.Tensor] = {}
    state = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
        state[name] = copies[id(tensor)]
    return state


@torch.no_grad()
def load_full_state(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copy whole weights into a whole module, in place. Raises as `match_names` does."""
    for tensor, value in match_names(module, state, {}):
        tensor.copy_(value)


def match_names(
    module: torch.nn.Module, state: dict[str, torch.Tensor], shapes: dict[str, torch.Size]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a module's own tensor and the given value, each tensor once.

    `shapes` tells the whole shape of tensors that are sharded. A name that is missing because its tensor is tied
    to one that is given is no fault (Hugging Face saves only one of them).

    Raises
    ------
    UsageOnRankError
        Names that are missing, unexpected, or of another shape; the first few of them are shown.
    """
    own = module.state_dict(keep_vars=True)
    given = {id(own[name]): state[name] for name in own if name in state}
    faults = {
        "missing": [name for name, tensor in own.items() if id(tensor) not in given],
        "unexpected": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)} for {tuple(shapes.get(name, own[name].shape))}"
            for name in own
            if name in state and state[name].shape != shapes.get(name, own[name].shape)
        ],
    }
    told = in_words(faults)
    if told:
        message = f"The weights do not fit this {type(module).__name__}: {told}"
        raise UsageOnRankError(message, "Give whole weights with the names of model.state_dict().")
    tensors = {id(tensor): tensor for tensor in own.values()}
    return [(tensors[key], value) for key, value in given.items()]


def in_words(faults: Mapping[str, list[str]]) -> str:
    """Names by what is wrong with them, the first few of each kind; empty where nothing is."""
    return "; ".join(
        f"{len(names)} {kind} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
        for kind, names in faults.items()
        if names
    )
