"""Run on each rank: what is fsdp's own, on strategy objects without the context; the tests judge what is found."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ddl_magics.errors import DDLError
from ddl_magics.rank import group, world
from ddl_magics.strategies import fsdp_shards, spec
from ddl_magics.strategies.base import Prepared, Training
from tests.strategies.models import MLP, llama, samples
from tests.strategies.ranks import Notes

torch.set_num_threads(1)
here = world.from_environment("cpu")
group.open_group(here)
notes = Notes(sys.argv[1], here.rank)


def prepared(text: str, optimizer: Any, precision: str = "32", *, stepped: int = 0) -> Prepared:
    """A tied Llama; `stepped`: steps of the plain model, all of it on each rank, before `prepare`."""
    torch.manual_seed(0)
    model = llama(tied=True)
    made = optimizer(model)
    for number in range(stepped):
        model(**batch(number, whole=True)).loss.backward()
        made.step()
        made.zero_grad()
    return spec.load(spec.parse(text), here).prepare(model, made, Training(precision))


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(number: int, *, whole: bool = False) -> dict[str, torch.Tensor]:
    mine = samples("llama", 8 * (number + 1))[-8:][0 if whole else here.rank :: 1 if whole else here.world_size]
    return {key: torch.stack([sample[key] for sample in mine]) for key in mine[0]}


def train(one: Prepared, numbers: range, parts: int = 1) -> list[float]:
    """Losses over the whole batch; each step in so many backwards of the same batch."""
    losses = []
    for number in numbers:
        for part in range(parts):
            loss = one(**batch(number)).loss
            one.backward(loss / parts, boundary=part == parts - 1)
        one.step(1.0)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / here.world_size)
    return losses


def bytes_of(one: Prepared) -> dict[str, int]:
    return dict(one.memory())


# Checks: each returns what JSON can hold.


def names() -> dict[str, Any]:
    one = prepared("fsdp", adamw)
    kinds = {type(part).__name__ for part in one.module.modules()}
    before = [name for name, _ in llama(tied=True).named_parameters()]
    found = {
        "class": type(one.module).__name__,
        "is one": isinstance(one.module, type(llama(tied=True))),
        "renamed": sorted(kind for kind in kinds if kind.startswith("FSDP")),
        "same names": [name for name, _ in one.module.named_parameters()] == before,
        "state": list(one.full_state_dict()) == list(llama(tied=True).state_dict()),
    }
    one.close()
    return found | {"after": type(one.module).__name__, "plain": type(one.module) is type(llama(tied=True))}


def memory() -> dict[str, Any]:
    """At rest, after an evaluation, between two backwards, and at its height inside the forward."""
    one = prepared("fsdp", adamw)
    rest = bytes_of(one)
    inside: list[int] = []
    layers = one.module.model.layers
    layers[1].mlp.register_forward_hook(lambda *_: inside.append(bytes_of(one)["parameters"]))
    with torch.no_grad():
        one(**batch(0))
    evaluated = bytes_of(one)
    one.backward(one(**batch(0)).loss, boundary=False)
    between = bytes_of(one)
    one.backward(one(**batch(0)).loss, boundary=True)
    one.step(None)
    after = bytes_of(one)
    sizes = {name: sum(4 * p.numel() for p in part.parameters()) for name, part in one.module.model.named_children()}
    whole = sum(4 * parameter.numel() for parameter in one.module.parameters())
    one.close()
    return {
        "rest": rest, "inside": max(inside), "evaluated": evaluated, "between": between, "after": after,
        "whole": whole, "root": whole - sizes["layers"], "layers": sizes["layers"],
    }  # fmt: skip


def optimizer_with_state() -> dict[str, Any]:
    """One that has stepped before goes on, here and under ddp, which keeps it as it is."""
    found = {}
    for text in ("ddp", "fsdp"):
        one = prepared(text, adamw, stepped=2)
        found[text] = train(one, range(2, 5))
        one.close()
    return found


def accumulation() -> dict[str, Any]:
    found = {}
    for parts in (1, 3):
        one = prepared("fsdp", adamw)
        found[f"{parts} parts"] = train(one, range(3), parts)
        one.close()
    return found


def mixed() -> dict[str, Any]:
    """What is fp32 under bf16-mixed, and what bf16."""
    one = prepared("fsdp", adamw, "bf16-mixed")
    gathered: set[str] = set()
    one.module.model.layers[0].register_forward_pre_hook(
        lambda part, _: gathered.update(str(parameter.dtype) for parameter in part.parameters())
    )
    logits: list[str] = []
    output = one(**batch(0))
    logits.append(str(output.logits.dtype))
    one.backward(output.loss, boundary=True)
    found = {
        "gathered": sorted(gathered),
        "logits": logits,
        "weights": sorted({str(parameter.dtype) for parameter in one.module.parameters()}),
        "gradients": sorted({str(parameter.grad.dtype) for parameter in one.module.parameters()}),
    }
    one.close()
    return found


def half_way() -> dict[str, Any]:
    """A failure inside a block, in the forward and in the backward, on all ranks; then the group is made anew."""
    one = prepared("fsdp", adamw)
    losses = train(one, range(1))
    block = one.module.model.layers[1]

    def fails(*_: Any) -> None:
        raise RuntimeError("broken")

    def fails_in_backward(_part: Any, _given: Any, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output).register_hook(fails)

    for number, lay in enumerate((block.mlp.register_forward_pre_hook, block.mlp.register_forward_hook), start=1):
        hook = lay(fails if number == 1 else fails_in_backward)
        raised = ""
        try:
            train(one, range(number, number + 1))
        except RuntimeError as error:
            raised = str(error)
        hook.remove()
        assert raised == "broken"
        group.reopen_group()
        one.strategy.rebind()
        one.rebind()
        losses += train(one, range(number, number + 1))
    one.close()
    return {"losses": losses, "expected": train(prepared("fsdp", adamw), range(3))}


def prepared_again() -> dict[str, Any]:
    """After close it can be prepared again, in another precision and place, and its weights are what they were."""
    one = prepared("fsdp", adamw)
    first = train(one, range(2))
    before = one.full_state_dict()
    one.close()
    again = spec.load(spec.parse("fsdp,offload=cpu"), here).prepare(
        one.module, adamw(one.module), Training("bf16-mixed")
    )
    same = all(torch.equal(value, before[name]) for name, value in again.full_state_dict().items())
    second = train(again, range(2, 4))
    again.close()
    return {"same": same, "losses": first + second}


def refused() -> dict[str, Any]:
    def said(action: Any) -> str:
        try:
            action()
        except DDLError as error:
            return str(error)
        return ""

    strategy = spec.load(spec.parse("fsdp"), here)
    odd = MLP()
    odd.temperature = torch.nn.Parameter(torch.tensor(1.0))
    return {"number": said(lambda: strategy.prepare(odd, None, Training()))}


def muon() -> dict[str, Any]:
    """It looks at whole matrices, which DTensor lets it see, in bf16."""

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        return torch.optim.Muon(matrices, lr=1e-2)

    return {text: train(prepared(text, make), range(3)) for text in ("ddp", "fsdp")}


def one_rank_more_than_rows() -> dict[str, Any]:
    """Parameters of one row leave the last ranks with none."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = spec.load(spec.parse("fsdp"), here).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), Training())
    rows = [fsdp_shards.local(parameter).shape[0] for parameter in one.module.parameters()]
    same = all(torch.equal(value, before[name]) for name, value in one.full_state_dict().items())
    one.backward(one(torch.ones(2, 3)).square().mean(), boundary=True)
    norm = float(one.step(1.0))
    return {"rows": rows, "same": same, "norm": norm}


CHECKS = (
    names, memory, optimizer_with_state, accumulation, mixed, half_way, prepared_again, refused, muon,
    one_rank_more_than_rows,
)  # fmt: skip

for check in CHECKS:
    if not sys.argv[2:] or check.__name__ in sys.argv[2:]:
        began = time.monotonic()
        notes.write(check.__name__, check())
        dist.barrier()
        notes.write(f"seconds of {check.__name__}", round(time.monotonic() - began, 1))
group.close_group()
