"""What a checkpoint holds beside the tensors: taken from a model in training, and given to one.

The optimizer's hyperparameters, the schedules, the random state of every rank, how far the training is in its loaders,
and what the user saves beside. All as of the last optimizer step. Limits: loaders and schedules that were not given to
the model's `prepare` are not known.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.errors import CheckpointError
from ddl_magics.rank.checkpoint import plain, randomness
from ddl_magics.rank.checkpoint.beside import own_class
from ddl_magics.rank.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.rank.training import Training

Record = dict[str, Any]


def take(training: Training, extra: dict[str, Any]) -> Record:
    """Everything but the random states, as JSON holds it.

    Raises
    ------
    CheckpointError
        Something of it cannot be kept, or the model's last update broke off half-way.
    """
    prepared = training.prepared
    if prepared.updates.torn:
        message = f"The last update of {training.name} broke off, so that some of its weights have moved and others not"
        raise CheckpointError(message, "Load a checkpoint, or make one more step.")
    return {
        "ddl_magics": metadata.version("ddl-magics"),
        "torch": torch.__version__,
        "step": training.steps,
        "batches": training.batches,
        "model": own_class(prepared.module).__name__,
        "strategy": prepared.strategy.spec.text,
        "accumulate": training.accumulate,
        "optimizer": _optimizer(training),
        "schedules": [
            {"kind": type(one).__name__, "state": plain.encode(one.state_dict(), type(one).__name__)}
            for one in training.schedules
        ],
        "loaders": [dataclasses.asdict(loader.bookmark.position()) for loader in training.loaders],
        "extra": {name: plain.encode(value, name) for name, value in extra.items()},
    }


def random_state(training: Training) -> randomness.State:
    """Of this rank: of now, or of the last step where batches were begun since that are to be done again."""
    begun = training.unsettled or any(loader.bookmark.is_ahead for loader in training.loaders)
    return training.random if begun and training.random is not None else randomness.take()


def _optimizer(training: Training) -> Record | None:
    optimizer = training.prepared.optimizer
    if optimizer is None:
        return None
    kind = type(optimizer).__name__
    groups = [
        {key: plain.encode(value, f"{kind}'s {key}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"kind": kind, "groups": groups, "names": training.group_names}


def check(record: Record, training: Training) -> None:
    """Raise CheckpointError where optimizer or schedules are not those that were saved; nothing is changed."""
    if training.unsettled:
        message = f"{training.name} is in the middle of a step: gradients wait"
        raise CheckpointError(message, "Load before the loop, or after ddl.step.")
    _check_optimizer(record["optimizer"], training)
    kinds = [schedule["kind"] for schedule in record["schedules"]]
    own = [type(schedule).__name__ for schedule in training.schedules]
    if training.prepared.optimizer is not None and kinds != own:
        message = f"The checkpoint has the schedules {_these(kinds)}, and ddl.prepare was given {_these(own)}"
        raise CheckpointError(message, "Give ddl.prepare the same ones.")


def _check_optimizer(saved: Record | None, training: Training) -> None:
    optimizer = training.prepared.optimizer
    if saved is None or optimizer is None:
        return
    kind = type(optimizer).__name__
    remedy = "Make the same one before ddl.prepare; without an optimizer, only weights are loaded."
    if saved["kind"] != kind:
        raise CheckpointError(f"The checkpoint has the state of {saved['kind']}, and this optimizer is {kind}", remedy)
    if len(saved["groups"]) != len(optimizer.param_groups):
        counts = f"{len(saved['groups'])} groups of parameters, and this one {len(optimizer.param_groups)}"
        raise CheckpointError(f"The {kind} of the checkpoint has {counts}", remedy)
    for index, (names, own) in enumerate(zip(saved["names"], training.group_names, strict=True)):
        differ = [name for name in (*names, *own) if (name in names) != (name in own)]
        if differ:
            message = f"Group {index} of the {kind} is another than in the checkpoint: {_these(differ[:3])}"
            raise CheckpointError(message, remedy)


def _these(words: list[str]) -> str:
    return ", ".join(words) or "none"


def give(record: Record, training: Training, rank: int, note: Callable[[str], object]) -> None:
    """Put everything back that `check` found to fit; the tensors are there already."""
    optimizer = training.prepared.optimizer
    if record["optimizer"] is not None and optimizer is not None:
        for group, saved in zip(optimizer.param_groups, record["optimizer"]["groups"], strict=True):
            for key, value in plain.decode(saved).items():
                if isinstance(group.get(key), torch.Tensor):  # a rate that a captured graph reads stays in its place
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value
        for schedule, saved in zip(training.schedules, record["schedules"], strict=True):
            schedule.load_state_dict(plain.decode(saved["state"]))
    training.batches = record["batches"]
    positions = [Position(**saved) for saved in record["loaders"]]
    if len(positions) != len(training.loaders):
        note(
            f"The checkpoint was saved with {len(positions)} loaders and ddl.prepare was given {len(training.loaders)}:"
            " they begin anew."
        )
    else:
        for loader, position in zip(training.loaders, positions, strict=True):
            said = loader.bookmark.take_up(position)
            if said:
                note(said)
    randomness.give(record["random"], rank)


def epoch(record: Record) -> int:
    """Epochs that were trained to their end, of the loader that came first."""
    return int(record["loaders"][0]["epochs"]) if record["loaders"] else 0
