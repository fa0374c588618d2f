"""Run on each rank: pretrained folders of every family under every strategy, and folders that cannot be loaded.

Started as `pretrained_ranks.py FOLDER MODELS`; MODELS holds a folder for each family, with the logits that plain
transformers gives; the tests judge the differences.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ddl_magics.errors import DDLError
from ddl_magics.protocol import CellRequest
from ddl_magics.rank.program import init
from ddl_magics.strategies import homes
from tests.strategies.pretrained_models import FAMILIES, ids
from tests.strategies.ranks import Notes

STRATEGIES = {
    **dict.fromkeys(("single", "ddp", "zero:3", "fsdp", "axonn:2x1x1"), tuple(FAMILIES)),
    **dict.fromkeys(("zero:2", "zero:3,offload_param=cpu", "fsdp,offload=cpu", "axonn:1x1x2"), ("llama-tied",)),
}
"""The families that are loaded under each."""
SLOW = "zero"
"""Its engine takes seconds to start: most families are loaded under it and not trained."""
torch.set_num_threads(1)
ddl = init("ddp", device="cpu")
notes = Notes(sys.argv[1], ddl.rank)
models = Path(sys.argv[2])
cells = itertools.count(1)


def begin(strategy: str, precision: str = "32") -> None:
    number = next(cells)
    run = f"run{number}"
    request = CellRequest(code="", cell=number, run=run, name=run, strategy=strategy, precision=precision, seed=1)
    ddl.recorder.start_run(run)
    ddl.begin_cell(request)


def said(name: str | Path, **options: Any) -> str:
    try:
        ddl.from_pretrained(name, **options)
    except DDLError as error:
        return str(error)
    return ""


def held(model: torch.nn.Module) -> int:
    """Elements of parameters that this rank has memory for."""
    own = {home.get() for home in homes.homes(model)}
    sizes = [getattr(parameter, "ds_tensor", parameter) for parameter in own]
    return sum(tensor.to_local().numel() if hasattr(tensor, "to_local") else tensor.numel() for tensor in sizes)


def families(strategy: str) -> dict[str, Any]:
    """Logits, weights and one optimizer step, beside what plain transformers gives."""
    found: dict[str, Any] = {}
    for name in STRATEGIES[strategy]:
        begin(strategy)
        if strategy == "single" and ddl.rank > 0:
            continue
        model = ddl.from_pretrained(models / name)
        before = ddl.full_state_dict(model)
        share = held(model) / sum({id(tensor): tensor.numel() for tensor in before.values()}.values())
        trains = SLOW not in strategy or name == "llama-tied"
        if trains:
            model, _ = ddl.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        else:
            model = ddl.prepare(model)
        with torch.no_grad():
            logits = model(input_ids=ids()).logits
        reference = torch.load(models / f"{name}.pt")
        found[name] = {
            "logits": float((logits - reference["logits"]).abs().max() / reference["logits"].abs().max()),
            "names": list(before) == list(reference["weights"]),
            "weights": all(torch.equal(before[key], value) for key, value in reference["weights"].items()),
            "share": share,
            "evaluates": not ddl.unwrap(model).training,
            "generation": ddl.unwrap(model).generation_config.max_new_tokens,
        }
        if trains:
            own = torch.chunk(ids(), ddl.world_size)[ddl.rank]
            ddl.backward(model(input_ids=own, labels=own).loss)
            ddl.step()
            after = ddl.full_state_dict(model)
            found[name] |= {
                "trained": max(float((after[key] - value).abs().max()) for key, value in reference["after"].items()),
                "moved": max(float((before[key] - value).abs().max()) for key, value in after.items()),
            }
        del model
    return found


def dtypes() -> dict[str, Any]:
    found = {}
    for strategy in ("ddp", "zero:3", "fsdp", "axonn:2x1x1"):
        for precision, dtype in (("32", None), ("bf16-true", None), ("32", "bfloat16"), ("bf16-true", "auto")):
            begin(strategy, precision)
            model = ddl.from_pretrained(models / "llama", dtype=dtype, attention_dropout=0.25)
            kinds = {str(tensor.dtype) for tensor in ddl.full_state_dict(model).values()}
            found[f"{strategy} {precision} {dtype}"] = [*kinds, model.config.attention_dropout]
            model, _ = ddl.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with torch.no_grad():
                found[f"{strategy} {precision} {dtype}"].append(str(model(input_ids=ids()).logits.dtype))
    return found


def refused() -> dict[str, Any]:
    found = {}
    for strategy in ("ddp", "fsdp"):
        begin(strategy)
        found[strategy] = {
            "no folder": said(models / "nothing"),
            "no such name": said("nobody/nothing"),
            "setting": said(models / "llama", attention_dropuot=0.1),
            "dtype": said(models / "llama", dtype="int8"),
            "no causal model": said(models / "t5"),
            "missing": said(models / "incomplete"),
            "shape": said(models / "llama", vocab_size=65),
            "on one rank": said(models / "llama" if ddl.rank == 0 else models / "nothing"),
        }
    return found


def whole() -> dict[str, Any]:
    """A folder without safetensors is loaded by transformers, then prepared as any model."""
    found = {}
    for strategy in ("zero:3", "fsdp"):
        begin(strategy)
        model = ddl.prepare(ddl.from_pretrained(models / "pickled"))
        with torch.no_grad():
            logits = model(input_ids=ids()).logits
        reference = torch.load(models / "llama.pt")["logits"]
        found[strategy] = {"logits": float((logits - reference).abs().max())}
    return found


def unprepared() -> dict[str, Any]:
    """The rows of fsdp cannot compute before `prepare`; the model can be left and the next one loaded."""
    begin("fsdp")
    model = ddl.from_pretrained(models / "llama")
    try:
        model(input_ids=ids())
    except DDLError as error:
        return {"said": str(error)}
    return {"said": ""}


CHECKS = {strategy: lambda strategy=strategy: families(strategy) for strategy in STRATEGIES}
CHECKS |= {check.__name__: check for check in (dtypes, refused, whole, unprepared)}

for check, action in CHECKS.items():
    if not sys.argv[3:] or check in sys.argv[3:]:
        began = time.monotonic()
        notes.write(check, action())
        ddl.barrier()
        notes.write(f"seconds of {check}", round(time.monotonic() - began, 1))
ddl.close()
