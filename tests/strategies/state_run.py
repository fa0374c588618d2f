"""On a rank: one model under one strategy, its training, and its state out and in; a script makes the checks of it.

Saved state is a dictionary of whole tensors by name and kind; each rank has a copy, as each can read a checkpoint's
files. Importing this opens the process group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddl_magics.rank import group, world
from ddl_magics.strategies import spec
from ddl_magics.strategies.base import Entry, Training
from tests.strategies.state_models import OPTIMIZERS, batch, build, groups_of

if TYPE_CHECKING:
    from ddl_magics.strategies.base import Prepared, Strategy

State = dict[tuple[str, str], torch.Tensor]

torch.set_num_threads(1)
here = world.from_environment("cpu")
group.open_group(here)
strategies: dict[str, Strategy] = {}


def strategy_of(text: str) -> Strategy:
    """One for each spec, as a session has: making the groups of a grid takes its time."""
    if text not in strategies:
        strategies[text] = spec.load(spec.parse(text), here)
    return strategies[text]


class Run:
    """One model under one strategy, and its training on batches that depend on the step alone."""

    def __init__(self, text: str, model: str = "mixed", optimizer: str = "adamw", precision: str = "32") -> None:
        self.text, self.name = text, model
        self.strategy = strategy_of(text)
        self.here = not self.strategy.alone or here.rank == 0
        torch.manual_seed(0)
        with self.strategy.model_init():
            module = build(model)
        self.optimizer = OPTIMIZERS[optimizer](groups_of(module))
        self.prepared: Prepared = self.strategy.prepare(module, self.optimizer, Training(precision))

    def train(self, first: int, last: int) -> list[float]:
        """Losses over the whole batch of steps `first` to `last`, the same on all ranks."""
        losses = []
        for step in range(first, last):
            loss = torch.zeros(())
            if self.here:
                inputs = batch(self.name, step, self.strategy.data_rank, self.strategy.data_size)
                loss = self.prepared(**inputs).loss
                self.prepared.backward(loss, boundary=True)
                self.prepared.step(None)
            total = loss.detach().double()
            dist.all_reduce(total)
            losses.append(float(total) / self.strategy.data_size)
        return losses

    def gather(self, only: str = "") -> tuple[list[Entry], State]:
        """All entries, or those of one kind; and the tensors of those that came to this rank, as ranks take turns."""
        entries = [entry for entry in self.prepared.entries() if only in ("", entry.kind)] if self.here else []
        own = {}
        for number, entry in enumerate(entries):
            to = 0 if self.strategy.alone else number % here.world_size
            tensor = self.prepared.gather(entry, to)
            assert (tensor is not None) == (to == here.rank)
            if tensor is not None:
                assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype)
                own[entry.name, entry.kind] = tensor
        return entries, own

    def save(self, only: str = "") -> State:
        """All entries, or those of one kind, on every rank."""
        entries, own = self.gather(only)
        told: list[tuple[list[Entry], State]] = [([], {})] * here.world_size
        dist.all_gather_object(told, (entries, own))
        assert all(of_one == told[0][0] for of_one, _ in told if of_one)
        merged = {key: value for _, part in told for key, value in part.items()}
        return {(e.name, e.kind): merged[e.name, e.kind] for e in told[0][0]}

    def unlike(self, expected: State) -> list[str]:
        """What of `expected` is not kept here with the same bits, as far as this rank sees."""
        entries, own = self.gather()
        known = {(entry.name, entry.kind) for entry in entries} if self.here else expected
        return [
            "/".join(key)
            for key, value in expected.items()
            if key not in known or (key in own and not same(own[key], value))
        ]

    def load(self, state: State, steps: int) -> tuple[str, ...]:
        if not self.here:
            return ()
        self.prepared.resume_at(steps)
        items = [(Entry(name, kind, tuple(value.shape), value.dtype), value) for (name, kind), value in state.items()]
        return self.prepared.put(items)

    def close(self) -> None:
        self.prepared.close()


def furthest(got: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))


def apart(got: State, expected: State) -> float:
    """Largest difference of a weight that was gathered, in units of the largest weight."""
    weights = {key: value.double() for key, value in expected.items() if key[1] == "weight"}
    largest = max(float(value.abs().max()) for key, value in weights.items() if expected[key].is_floating_point())
    return (
        max((float((got[key] - value).abs().max()) for key, value in weights.items() if key in got), default=0.0)
        / largest
    )


def unlike(got: State, expected: State) -> list[str]:
    """What of `expected` is not in `got` with the same bits."""
    return ["/".join(key) for key, value in expected.items() if key not in got or not same(got[key], value)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
