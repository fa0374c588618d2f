"""Run on each rank: what `axonn` promises beside parity, measured on strategy objects.

Started as `axonn_ranks.py FOLDER CHECK...`; the tests judge what the checks find.
"""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ddl_magics.rank import group
from tests.strategies.axonn_bench import Partly, Tied, batch, close, furthest, here, mine, prepare, said, strategies
from tests.strategies.models import MLP, llama
from tests.strategies.ranks import Notes

if TYPE_CHECKING:
    from collections.abc import Callable

# Checks: each returns what JSON can hold.


def round_trip(grid: str) -> dict[str, Any]:
    """Whole weights in and out again, and what a misfit does."""
    prepared = prepare(f"axonn:{grid}", Tied())
    torch.manual_seed(7)
    other = {name: torch.rand(value.shape).to(value.dtype) for name, value in Tied().state_dict().items()}
    other["head.weight"] = other["embed.weight"]
    prepared.load_full_state_dict(other)
    back = prepared.full_state_dict()
    misfit = {**other, "up.weight": torch.zeros(2, 2), "more": torch.zeros(1)}
    del misfit["down.bias"]
    told = said(lambda: prepared.load_full_state_dict(misfit))
    again = prepared.full_state_dict()
    del other["head.weight"]  # a tied name may be left out
    prepared.load_full_state_dict(other)
    found = {
        "names": list(back) == list(Tied().state_dict()),
        "equal": furthest(back, other),
        "unchanged": furthest(again, back),
        "tied": back["head.weight"] is back["embed.weight"],
        "told": told,
        "without tied name": furthest(prepared.full_state_dict(), other),
    }
    prepared.close()
    return found


def memory(grid: str) -> dict[str, Any]:
    """Bytes held in the middle of a step, and what theory says: split weights by the grid, biases by its rows."""
    row, column, depth = map(int, grid.split("x"))
    module = Tied()
    share = {"weight": 1 / (row * column * depth), "bias": 1 / row}
    expected = 0.0
    for name, parameter in module.named_parameters():
        owner, _, kind = name.rpartition(".")
        expected += parameter.nbytes * (share[kind] if owner in {"up", "down", "mix"} else 1)
    prepared = prepare(f"axonn:{grid}", module, torch.optim.AdamW(module.parameters()))
    tokens = torch.arange(8).reshape(2, 4)
    for step in range(2):
        prepared.backward(prepared(tokens), boundary=True)
        if step == 0:
            prepared.step(1.0)
    held = prepared.memory()
    prepared.step(1.0)
    after = prepared.memory()
    prepared.close()
    return {"held": held, "after": after, "expected": expected, "notes": prepared.notes}


def start_from_rank_zero() -> bool:
    torch.manual_seed(here.rank)
    module = MLP()
    torch.manual_seed(0)
    expected = MLP().state_dict()
    prepared = prepare("axonn:2x1x1", module)
    got = prepared.full_state_dict()
    prepared.close()
    return furthest(got, expected) == 0


def resumed_optimizer() -> dict[str, Any]:
    """An optimizer that has made a step goes on as it would have without the split."""

    def after_one_step() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = MLP()
        optimizer = torch.optim.AdamW(
            [{"params": module.body.parameters(), "lr": 1e-2}, {"params": module.head.parameters()}], lr=1e-3
        )
        module(**batch(0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return module, optimizer

    plain, updates = after_one_step()
    plain(**batch(1)).loss.backward()
    updates.step()
    module, optimizer = after_one_step()
    groups = optimizer.param_groups
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    prepared = prepare("axonn:1x2x1", module, optimizer)
    kept = [{key: value for key, value in group.items() if key != "params"} for group in groups] == settings
    prepared.backward(prepared(**mine(batch(1))).loss, boundary=True)
    prepared.step(None)
    got = prepared.full_state_dict()
    prepared.close()
    return {"difference": furthest(got, plain.state_dict()), "settings kept": kept, "norm": prepared.step(None)}


def unequal_ranks() -> dict[str, Any]:
    """Slices of unequal length, and parameters that only one rank, or none, used."""
    torch.manual_seed(0)
    plain = Partly()
    module = copy.deepcopy(plain)
    x = torch.randn(8, 8)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1) for m in (plain, module)]
    ((plain(x[:3], True) + plain(x[3:], False)) / 2).backward()
    optimizers[0].step()
    prepared = prepare("axonn:2x1x1", module, optimizers[1])
    first = here.rank == 0
    prepared.backward(prepared(x[:3] if first else x[3:], first), boundary=True)
    unused = module.never.weight.grad is None
    prepared.step(None)
    got = prepared.full_state_dict()
    prepared.close()
    return {"difference": furthest(got, plain.state_dict()), "unused stays without gradient": unused}


def layers_that_stay_whole() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    gpt2 = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")).eval()
    tokens = torch.arange(8).reshape(2, 4)
    odd = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 8), nn.Linear(8, 8))
    single = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    x = torch.randn(2, 8)
    with torch.no_grad():
        logits, product = gpt2(tokens).logits, single(x)
        prepared = [prepare("axonn:2x1x1", gpt2), prepare("axonn:2x1x1", odd)]
        prepared.append(prepare("axonn:1x2x1", single, optimizer))
        found = {
            "gpt2": float((prepared[0](tokens).logits - logits).abs().max()),
            "gpt2 notes": prepared[0].notes,
            "odd": [type(layer).__name__ for layer in odd],
            "single": float((prepared[2](x) - product).abs().max()),
            "single's optimizer": [parameter.numel() for parameter in optimizer.param_groups[0]["params"]],
        }
    for one in prepared:
        one.close()
    return found


def torch_transformer() -> float:
    """Torch's encoder in inference, where it reads the weights of its linear layers itself if it can."""
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # about nested tensors, which are a prototype
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
        x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
        padding[0, 3:] = True
        with torch.no_grad():
            expected = encoder(x, src_key_padding_mask=padding)
    prepared = prepare("axonn:2x1x1", encoder)
    with torch.no_grad():
        got = prepared(x, src_key_padding_mask=padding)
    prepared.close()
    return float((got - expected)[~padding].abs().max())


def module_stays_as_it_was() -> dict[str, Any]:
    """Frozen parameters, hooks, double precision, and a copy of a split model."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    module[0].weight.requires_grad_(False)
    calls: list[str] = []
    module[2].register_forward_hook(lambda *_: calls.append("hook"))
    x = torch.randn(2, 8, dtype=torch.double)
    expected = module(x).detach()
    prepared = prepare("axonn:2x1x1", module)
    twin = copy.deepcopy(prepared.module)
    got, copied = prepared(x).detach(), twin(x).detach()
    prepared.close()
    return {
        "frozen": not module[0].weight.requires_grad and module[0].bias.requires_grad,
        "calls": len(calls),
        "difference": float((got - expected).abs().max()),
        "copy": float((copied - expected).abs().max()),
    }


def generation() -> dict[str, Any]:
    """Ranks whose prompts end at different times generate what one process generates."""
    torch.manual_seed(0)
    model = llama(tied=True).eval()
    length, stop = (4, 3) if here.rank == 0 else (7, 6)
    prompt = torch.randint(1, 64, (1, length), generator=torch.Generator().manual_seed(here.rank))
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0, "max_new_tokens": stop}
    expected = model.generate(prompt, **options)
    prepared = prepare("axonn:2x1x1", model)
    got = prepared.module.generate(prompt, synced_gpus=prepared.sync_generate(), **options)
    prepared.close()
    return {"equal": got.tolist() == expected.tolist(), "length": got.shape[1]}


def refusals() -> dict[str, str]:
    """What the user reads when a model or an optimizer cannot be taken."""
    module = MLP()
    first = prepare("axonn:2x1x1", module)
    told = {"twice": said(lambda: prepare("axonn:2x1x1", module))}
    first.close()
    told["other grid"] = said(lambda: prepare("axonn:1x2x1", module))
    matrix = nn.Linear(8, 8, bias=False)
    told["muon"] = said(lambda: prepare("axonn:2x1x1", matrix, torch.optim.Muon(matrix.parameters())))
    again = prepare("axonn:2x1x1", module)
    told["same grid"] = said(lambda: again(**mine(batch())))
    strategies.pop("axonn:2x1x1").close()
    told["grid is gone"] = said(lambda: again(**mine(batch())))
    again.close()
    return told


def traffic() -> dict[str, int]:
    """Collectives of a backward before and at the boundary, where all ranks are data parallel."""
    module = MLP()
    prepared = prepare("axonn:1x1x1", module, torch.optim.SGD(module.parameters(), lr=0.1))
    names = ("all_reduce", "all_gather", "all_gather_single", "all_to_all_single", "reduce_scatter_single", "broadcast")
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    counts = {}
    for name in originals:
        setattr(dist, name, counted(name))
    try:
        for boundary in (False, True):
            calls.clear()
            prepared.backward(prepared(**mine(batch())).loss, boundary=boundary)
            counts["at" if boundary else "before"] = len(calls)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    prepared.close()
    return counts


def alternation() -> dict[str, list[dict[str, int]]]:
    """Threads and open files while strategies follow one another, and the world is built anew."""
    close()
    kept: list[Any] = []  # as the variables of a session keep models and optimizers

    def train(text: str) -> None:
        module = MLP()
        prepared = prepare(text, module, torch.optim.SGD(module.parameters(), lr=0.1))
        prepared.backward(prepared(**mine(batch())).loss, boundary=True)
        prepared.step(1.0)
        prepared.close()
        kept.append((module, prepared))

    counts: dict[str, list[dict[str, int]]] = {"kept": [], "closed": [], "rebuilt": []}
    for _ in range(3):
        for text in ("axonn:2x1x1", "axonn:1x2x1", "ddp", "axonn:2x1x1"):
            train(text)
        kept[:] = [pair for pair in kept if pair[1].strategy.spec.name == "axonn"]  # DDP holds its group itself
        counts["kept"].append(census())
    for _ in range(3):
        train("axonn:1x1x2")
        close()
        counts["closed"].append(census())
    for closed_first in (True, False, True, False):
        train("axonn:2x1x1")
        if closed_first:
            close()
        group.reopen_group()
        close()
        counts["rebuilt"].append(census())
    train("axonn:2x1x1")
    return counts


def census() -> dict[str, int]:
    gc.collect()
    return {what: sum(1 for _ in Path(f"/proc/self/{what}").iterdir()) for what in ("task", "fd")}


if __name__ == "__main__":
    notes = Notes(sys.argv[1], here.rank)
    for check in sys.argv[2:]:
        name, _, argument = check.partition(" ")
        notes.write(check, globals()[name](*([argument] if argument else [])))
        if name == "round_trip":
            close()
    close()
    group.close_group()
