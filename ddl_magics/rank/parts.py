"""Sorting what a user hands to `prepare`, and saying in one line what cannot go together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank.model import training_of


@dataclass
class Parts:
    """Objects of one call of `prepare` by kind; lists in the order given."""

    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    loaders: list[DataLoader[Any]] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)


def sort(objects: tuple[Any, ...]) -> Parts:
    """Sort the arguments of `prepare`.

    Raises
    ------
    UsageOnRankError
        Something is of no known kind, there are two of what there must be one of, or a part misses its partner.
    """
    if not objects:
        raise UsageOnRankError("prepare was given nothing", "Write model, optimizer, loader = ddl.prepare(...).")
    parts = Parts()
    for thing in objects:
        _add(parts, thing)
    if parts.optimizer is not None and parts.model is None:
        raise UsageOnRankError("prepare was given an optimizer without its model", "Give both in one call.")
    if parts.schedulers and parts.optimizer is None:
        raise UsageOnRankError("prepare was given a schedule without its optimizer", "Give both in one call.")
    if parts.model is not None and parts.optimizer is not None:
        _check_belongs(parts.model, parts.optimizer)
    return parts


def _add(parts: Parts, thing: Any) -> None:
    if training_of(thing) is not None:
        raise UsageOnRankError("This model is prepared already", "Use it as it is, or build it anew.")
    if isinstance(thing, torch.nn.Module):
        if parts.model is not None:
            raise UsageOnRankError("prepare was given two models", "Call ddl.prepare once for each.")
        parts.model = thing
    elif isinstance(thing, torch.optim.Optimizer):
        if parts.optimizer is not None:
            raise UsageOnRankError("prepare was given two optimizers", "Call ddl.prepare once for each model.")
        parts.optimizer = thing
    elif isinstance(thing, DataLoader):
        parts.loaders.append(thing)
    elif is_schedule(thing):
        parts.schedulers.append(thing)
    else:
        raise UsageOnRankError(
            f"prepare cannot use a {type(thing).__name__}",
            "It takes models, optimizers, DataLoaders and learning-rate schedulers.",
        )


def is_schedule(thing: Any) -> bool:
    """Whether `thing` is a learning-rate scheduler of torch's kind."""
    return isinstance(thing, LRScheduler | ReduceLROnPlateau)


def group_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[list[str]]:
    """Names of the parameters in each of the optimizer's groups, before a strategy puts others in their place."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups if optimizer is not None else []
    return [[names[id(parameter)] for parameter in group["params"] if id(parameter) in names] for group in groups]


def steps_by_itself(schedule: Any) -> bool:
    """Whether a schedule moves with the optimizer's steps; one that wants a metric is the user's to call."""
    return not isinstance(schedule, ReduceLROnPlateau)


def _check_belongs(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if held and not any(id(parameter) in own for parameter in held):
        raise UsageOnRankError(
            f"The optimizer holds no parameter of this {type(model).__name__}",
            "Make it after the model, from model.parameters().",
        )
