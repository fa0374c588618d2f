"""Run on each rank: what checkpoints ask of a strategy, measured on strategy objects and without files.

Started as `state_ranks.py FOLDER CHECK...`. Saved state is a dictionary of whole tensors by name and kind; each rank
has a copy, as each can read a checkpoint's files.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddl_magics.errors import DDLError
from ddl_magics.rank import group, world
from ddl_magics.strategies import spec
from ddl_magics.strategies.base import Entry, Training
from tests.strategies.ranks import Notes
from tests.strategies.state_models import OPTIMIZERS, batch, build, groups_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.strategies.base import Prepared

TWO = (
    "single",
    "ddp,find_unused_parameters=true",
    "zero:1",
    "zero:2",
    "zero:3",
    "zero:2,offload=cpu",
    # "fsdp",
    "axonn:2x1x1",
    "axonn:1x2x1",
    "axonn:1x1x2",
)
FOUR = tuple(
    f"axonn:{grid}"
    for grid in ("4x1x1", "1x4x1", "1x1x4", "2x2x1", "2x1x2", "1x2x2", "2x1x1", "1x2x1", "1x1x2", "1x1x1")
)
HALF = 5
"""Steps before the state is saved, and after."""

State = dict[tuple[str, str], torch.Tensor]

torch.set_num_threads(1)
here = world.from_environment("cpu")
group.open_group(here)
notes = Notes(sys.argv[1], here.rank)
SPECS = TWO if here.world_size == 2 else FOUR


class Run:
    """One model under one strategy, and its training on batches that depend on the step alone."""

    def __init__(self, text: str, model: str = "mixed", optimizer: str = "adamw", precision: str = "32") -> None:
        self.text, self.name = text, model
        self.strategy = spec.load(spec.parse(text), here)
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

    def save(self) -> State:
        """All entries, gathered to ranks in turn, on every rank."""
        entries = self.prepared.entries() if self.here else []
        own = {}
        for number, entry in enumerate(entries):
            to = 0 if self.strategy.alone else number % here.world_size
            tensor = self.prepared.gather(entry, to)
            assert (tensor is not None) == (to == here.rank)
            if tensor is not None:
                assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype)
                own[entry.name, entry.kind] = tensor
        parts: list[State] = [{}] * here.world_size
        dist.all_gather_object(parts, own)
        entries_of_all: list[list[Entry]] = [[]] * here.world_size
        dist.all_gather_object(entries_of_all, entries)
        assert all(of_one == entries_of_all[0] for of_one in entries_of_all if of_one)
        merged = {key: value for part in parts for key, value in part.items()}
        return {(e.name, e.kind): merged[e.name, e.kind] for e in entries_of_all[0]}

    def load(self, state: State, steps: int) -> tuple[str, ...]:
        if not self.here:
            return ()
        self.prepared.resume_at(steps)
        items = [(Entry(name, kind, tuple(value.shape), value.dtype), value) for (name, kind), value in state.items()]
        return self.prepared.put(items)

    def close(self) -> None:
        self.prepared.close()
        self.strategy.close()


def furthest(got: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))


def apart(got: State, expected: State) -> float:
    """Largest difference of a weight, in units of the largest weight."""
    weights = [key for key in expected if key[1] == "weight"]
    largest = max(float(expected[key].abs().max()) for key in weights if expected[key].is_floating_point())
    return max(float((got[key].double() - expected[key].double()).abs().max()) for key in weights) / largest


def unlike(got: State, expected: State) -> list[str]:
    """What of `expected` is not in `got` with the same bits."""
    return ["/".join(key) for key, value in expected.items() if key not in got or not same(got[key], value)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def said(action: Callable[..., Any], *given: Any) -> str:
    try:
        action(*given)
    except DDLError as error:
        return str(error)
    return ""


# Checks: each returns what JSON can hold.


def halves(model: str) -> dict[str, tuple[State, State, list[float]]]:
    """Under each strategy: the state after the first half, that at the end, and the losses of the second half."""
    found = {}
    for text in SPECS:
        run = Run(text, model)
        run.train(0, HALF)
        middle = run.save()
        losses = run.train(HALF, 2 * HALF)
        found[text] = middle, run.save(), losses
        run.close()
    return found


def into(text: str, sources: list[str], model: str, found: dict[str, tuple[State, State, list[float]]]) -> dict[str, Any]:
    """The second half under one strategy after the first half under each of `sources`, and the state in between."""
    told = {}
    run = Run(text, model)  # the first source meets a model that has not stepped, the others one that has
    for source in sources:
        middle, end, losses = found[source]
        said_to_the_user = run.load(middle, HALF)
        again = run.save()
        told[source] = {
            "unlike": unlike(again, middle) if dist.get_rank() == 0 else [],
            "losses": furthest(run.train(HALF, 2 * HALF), losses),
            "weights": apart(run.save(), end),
            "steps": run.prepared.updates.count if run.here else 2 * HALF,
            "notes": said_to_the_user,
        }
    run.close()
    return told


def any_to_any() -> dict[str, Any]:
    found = halves("mixed")
    names = {text: ["/".join(key) for key in middle] for text, (middle, _, _) in found.items()}
    pairs = {text: into(text, [text, *(s for s in SPECS if s != text)], "mixed", found) for text in SPECS}
    return {"pairs": pairs, "names": names}


CHECKS = (any_to_any,)

for check in CHECKS:
    if not sys.argv[2:] or check.__name__ in sys.argv[2:]:
        notes.write(check.__name__, check())
group.close_group()
