"""Run on each rank: what checkpoints ask of a strategy, measured on strategy objects and without files.

Started as `state_ranks.py FOLDER CHECK...`.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ddl_magics.errors import DDLError
from ddl_magics.rank import group
from ddl_magics.strategies.base import Entry, Training
from tests.strategies.ranks import Notes
from tests.strategies.state_models import OPTIMIZERS, build
from tests.strategies.state_run import Run, State, apart, furthest, here, same, strategies, strategy_of, unlike

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

UNUSED = "ddp,find_unused_parameters=true"
TWO = (
    "single",
    UNUSED,
    "zero:1",
    "zero:2",
    "zero:3",
    "zero:2,offload=cpu",
    "fsdp",
    "axonn:2x1x1",
    "axonn:1x2x1",
    "axonn:1x1x2",
)
FOUR = tuple(
    f"axonn:{grid}" for grid in ("4x1x1", "1x4x1", "1x1x4", "2x2x1", "2x1x2", "1x2x2", "2x1x1", "1x2x1", "1x1x2")
)
CHAIN = ("single", "zero:2,offload=cpu", "zero:3,offload=cpu,offload_param=cpu", "axonn:2x1x1", "zero:1")
LLAMA = ("single", "zero:2", "zero:3", "fsdp", "axonn:2x1x1")
WHOLE = ("single", UNUSED)
"""For optimizers that need whole parameters, or that ZeRO does not take."""
HALF = 3
"""Steps before the state is saved, and after."""

PRECISIONS = (
    ("zero:2", "bf16-mixed"),
    (UNUSED, "bf16-true"),
    ("zero:1", "bf16-true"),
    ("zero:3", "bf16-true"),
    ("zero:2,offload=cpu", "bf16-true"),
    ("axonn:2x1x1", "bf16-true"),
    ("fsdp", "bf16-true"),
)

notes = Notes(sys.argv[1], here.rank)
SPECS = TWO if here.world_size == 2 else FOUR


def said(action: Callable[..., Any], *given: Any) -> str:
    try:
        action(*given)
    except DDLError as error:
        return str(error)
    return ""


# Checks: each returns what JSON can hold.


class Halves(NamedTuple):
    """What one strategy made of the first and of the second half."""

    middle: State
    end: State
    losses: list[float]
    """Of the second half."""
    unlike: list[str]
    """Weights at the end that `full_state_dict`, which goes its own way, gives with other bits."""


def both_halves(text: str, model: str) -> Halves:
    run = Run(text, model)
    run.train(0, HALF)
    middle = run.save()
    losses = run.train(HALF, 2 * HALF)
    end = run.save("weight")
    whole = {(name, "weight"): value for name, value in run.prepared.full_state_dict().items()} if run.here else end
    run.close()
    return Halves(middle, end, losses, unlike(whole, end))


def second_half(
    text: str, sources: Sequence[str], model: str, found: dict[str, Halves], trained: int
) -> dict[str, Any]:
    """The state under one strategy after it was put there from each of `sources`.

    For the first `trained` of them, also what it makes of the second half. The first source of all meets a model that
    has not stepped, the others one that has.
    """
    told = {}
    run = Run(text, model)
    for number, source in enumerate(sources):
        middle, end, losses, _ = found[source]
        notes = run.load(middle, HALF)
        told[source] = {"unlike": run.unlike(middle), "notes": notes}
        if number < trained:
            told[source] |= {
                "losses": furthest(run.train(HALF, 2 * HALF), losses),
                "weights": apart(run.gather("weight")[1], end),
                "steps": run.prepared.updates.count if run.here else 2 * HALF,
            }
    run.close()
    return told


def beginning_with(text: str) -> list[str]:
    """All strategies in a ring, from one on."""
    return [*SPECS[SPECS.index(text) :], *SPECS[: SPECS.index(text)]]


def any_to_any() -> dict[str, Any]:
    """Every strategy into every one; on four ranks, where it is the grid that differs, trained under two of them."""
    found = {text: both_halves(text, "mixed") for text in SPECS}
    names = {text: ["/".join(key) for key in halves.middle] for text, halves in found.items()}
    trained = len(SPECS) if here.world_size == 2 else 2
    pairs = {text: second_half(text, beginning_with(text), "mixed", found, trained) for text in SPECS}
    return {"pairs": pairs, "names": names, "unlike": {text: halves.unlike for text, halves in found.items()}}


def other_models() -> dict[str, Any]:
    """Each strategy into itself and into the one before it."""
    told = {}
    for model, specs in (("llama-tied", LLAMA), ("mlp", ("zero:2", "zero:3", "axonn:2x1x1"))):
        found = {text: both_halves(text, model) for text in specs}
        ring = {text: [text, specs[specs.index(text) - 1]] for text in specs}
        told[model] = {text: second_half(text, ring[text], model, found, trained=2) for text in specs}
    return told


def other_optimizers() -> dict[str, Any]:
    """A step in one process, and then one more under each strategy in turn, each going on from the one before."""
    told = {}
    for name in OPTIMIZERS:
        chain = WHOLE if name in ("adagrad", "adafactor") else CHAIN
        whole = Run("single", optimizer=name)
        expected = whole.train(0, len(chain))
        end = whole.save()
        whole.close()
        losses, differences, kinds = [], [], {}
        state: State = {}
        for number, text in enumerate(chain):
            run = Run(text, optimizer=name)
            if state:
                run.load(state, number)
                differences += unlike(run.save(), state)
            losses += run.train(number, number + 1)
            state = run.save()
            kinds[text] = sorted({kind for _, kind in state})
            run.close()
        told[name] = {
            "losses": furthest(losses, expected),
            "weights": apart(state, end),
            "unlike": differences,
            "kinds": kinds,
        }
    return told


def precisions() -> dict[str, Any]:
    """Into a new model under the same strategy."""
    told: dict[str, Any] = {}
    for text, precision in PRECISIONS:
        run = Run(text, precision=precision)
        run.train(0, HALF)
        middle = run.save()
        losses = run.train(HALF, 2 * HALF)
        run.close()
        run = Run(text, precision=precision)
        run.load(middle, HALF)
        told[f"{text} {precision}"] = {
            "unlike": unlike(run.save(), middle),
            "same losses": run.train(HALF, 2 * HALF) == losses,
            "dtypes": {kind: str(value.dtype) for (name, kind), value in middle.items() if name == "embedding.weight"},
        }
        run.close()
    return told


def masters() -> dict[str, Any]:
    """With and without them, into strategies that have them and that have none."""
    shards = Run("zero:2", precision="bf16-true")
    shards.train(0, HALF)
    saved = shards.save()
    shards.close()
    exact = {key: saved.get((key[0], "master"), value) for key, value in saved.items() if key[1] == "weight"}
    told: dict[str, Any] = {}
    for text, precision in (("zero:3", "bf16-true"), (UNUSED, "bf16-true"), ("single", "32"), ("zero:1", "32")):
        run = Run(text, precision=precision)
        run.load(saved, HALF)
        again = run.save()
        wanted = {key: (exact[key] if precision == "32" else saved[key]).float() for key in exact}
        run.train(HALF, HALF + 1)
        told[f"{text} {precision}"] = {
            "unlike": unlike({key: value.float() for key, value in again.items()}, wanted),
            "masters": sum(kind == "master" for _, kind in again),
        }
        run.close()
    run = Run("zero:3", precision="bf16-true")
    run.load({key: value for key, value in saved.items() if key[1] != "master"}, HALF)
    again = run.save()
    told["taken from the weights"] = [
        torch.equal(value, again[name, "weight"].float()) for (name, kind), value in again.items() if kind == "master"
    ]
    run.close()
    return told


def other_precision() -> dict[str, Any]:
    """From fp32 weights into bf16 ones; as the reader of files does it, with entries of the model that it fills."""
    whole = Run("single")
    whole.train(0, HALF)
    saved = whole.save()
    whole.close()
    told: dict[str, Any] = {}
    for text in ("single", UNUSED, "fsdp", "zero:1", "zero:3", "axonn:2x1x1"):
        run = Run(text, precision="bf16-true")
        if run.here:
            own = {(entry.name, entry.kind): entry for entry in run.prepared.entries()}
            items = [
                (own.get(key, Entry(*key, tuple(value.shape), value.dtype)), value) for key, value in saved.items()
            ]
            run.prepared.resume_at(HALF)
            run.prepared.put(items)
        again = run.save()
        losses = run.train(HALF, HALF + 2)
        told[text] = {
            "dtypes": {kind: str(value.dtype) for (name, kind), value in again.items() if name == "embedding.weight"},
            "masters": [same(v, saved[name, "weight"]) for (name, kind), v in again.items() if kind == "master"],
            "losses": losses,
        }
        run.close()
    return told


def before_the_first_step() -> dict[str, Any]:
    """State that does not exist yet, put where there is some: training begins as it did."""
    told = {}
    for text in SPECS:
        run = Run(text)
        start = run.save()
        losses = run.train(0, 2)
        run.load(start, 0)
        again = run.save()
        told[text] = {
            "kinds": sorted({kind for _, kind in start}),
            "same": unlike(again, start) == [] and list(again) == list(start),
            "same losses": run.train(0, 2) == losses,
        }
        run.close()
    return told


def mostly_frozen() -> dict[str, Any]:
    """As with LoRA: a few small weights train in a model that is frozen; the same losses and state as one process."""
    told = {}
    for text in SPECS:
        run = Run(text, "adapted")
        losses = run.train(0, HALF)
        middle = run.save()
        losses += run.train(HALF, 2 * HALF)
        run.close()
        again = Run(text, "adapted")
        again.load(middle, HALF)
        told[text] = {
            "losses": losses,
            "states": sorted("/".join(key) for key in middle if key[1] != "weight"),
            "weights": sum(kind == "weight" for _, kind in middle),
            "again": again.train(HALF, 2 * HALF),
        }
        again.close()
    return told


class Read:
    """A whole tensor that counts how many elements were read of it."""

    total = 0

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole
        self.shape, self.dtype = whole.shape, whole.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.whole[index]
        Read.total += part.numel()
        return part


def what_is_read() -> dict[str, Any]:
    """Elements of which a rank holds a share, and how many of them it reads."""
    told = {}
    for text in SPECS:
        run = Run(text, "layers")
        run.train(0, 1)
        state = run.save()
        if run.here:
            Read.total = 0
            run.load({key: Read(value) for key, value in state.items()}, 1)
        run.close()
        told[text] = {"read": Read.total, "all": sum(value.numel() for value in state.values())}
    return told


def counts_that_differ() -> dict[str, Any]:
    """A parameter that began later than the others of its group, in one process and then under ZeRO."""
    run = Run("single")
    run.train(0, 4)
    state = run.save()
    run.close()
    late = {key: torch.tensor(2.0) if key == ("narrow.weight", "step") else value for key, value in state.items()}
    told = {}
    for text in ("zero:1", "zero:3", "axonn:2x1x1"):
        run = Run(text)
        notes = run.load(late, 4)
        steps = {float(value) for (_, kind), value in run.save().items() if kind == "step"}
        told[text] = {"notes": notes, "steps": sorted(steps)}
        run.close()
    return told


def deepspeed_sees_the_same() -> dict[str, Any]:
    """DeepSpeed's own functions for full state give what was put; its counters go on."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    told = {}
    for text in ("zero:1", "zero:2,offload=cpu", "zero:3"):
        run = Run(text)
        run.train(0, 2)
        state = run.save()
        run.train(2, 3)
        run.load(state, 2)
        parameter = run.prepared.module.body[0].weight
        engine = run.prepared.engine
        told[text] = {
            "weight": torch.equal(safe_get_full_fp32_param(parameter), state["body.0.weight", "weight"]),
            "state": torch.equal(
                safe_get_full_optimizer_state(parameter, "exp_avg"), state["body.0.weight", "exp_avg"]
            ),
            "counters": [engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps],
        }
        run.close()
    return told


def buffers_of_rank_zero() -> dict[str, Any]:
    """Running statistics differ between ranks: those of rank 0 are the model's, on whichever rank they are wanted."""
    told = {}
    for text in ("ddp", "zero:2", "zero:3", "fsdp", "axonn:2x1x1"):
        strategy = strategy_of(text)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        prepared = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), Training())
        module[1].running_mean.fill_(here.rank + 1)
        entry = next(entry for entry in prepared.entries() if entry.name == "1.running_mean")
        mean = prepared.gather(entry, here.world_size - 1)
        told[text] = None if mean is None else mean.tolist()
        prepared.close()
    return told


def refusals() -> dict[str, Any]:
    """What no checkpoint can hold, and what has no name."""
    told = {}
    for text in ("ddp", "zero:1", "zero:3"):
        strategy = strategy_of(text)
        model, other = build("mlp"), torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        if text == "ddp":
            prepared = strategy.prepare(model, optimizer, Training())
            told[text] = said(prepared.entries)
            prepared.close()
        else:
            told[text] = said(strategy.prepare, model, optimizer, Training())
    strategy = strategy_of("ddp")
    model = build("mlp")
    optimizer = torch.optim.LBFGS(model.parameters())
    prepared = strategy.prepare(model, optimizer, Training())
    optimizer.state[next(model.parameters())]["old_dirs"] = [torch.zeros(2)]
    told["lists"] = said(prepared.entries)
    prepared.close()
    return told


CHECKS = (
    any_to_any,
    other_models,
    other_optimizers,
    precisions,
    masters,
    other_precision,
    before_the_first_step,
    mostly_frozen,
    what_is_read,
    counts_that_differ,
    deepspeed_sees_the_same,
    buffers_of_rank_zero,
    refusals,
)

if here.world_size == 2:
    build("llama-tied")
    strategy_of("zero:1")
strategy_of("axonn:2x1x1")
gc.collect()
gc.freeze()  # strategies collect garbage between models, and the libraries that are loaded now are none
for check in CHECKS:
    if not sys.argv[2:] or check.__name__ in sys.argv[2:]:
        began = time.monotonic()
        notes.write(check.__name__, check())
        dist.barrier()
        notes.write(f"seconds of {check.__name__}", round(time.monotonic() - began, 1))
for strategy in strategies.values():
    strategy.close()
group.close_group()
