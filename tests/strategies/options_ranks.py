"""Run on each of two ranks: the options of training under each strategy, beside the same in one process.

Started as `options_ranks.py FOLDER SPEC...`; the tests judge what is found.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader

from ddl_magics.errors import DDLError
from ddl_magics.instructions import Padding, answer_tokens
from ddl_magics.protocol import CellRequest
from ddl_magics.rank.program import init
from ddl_magics.rank.world import world_of_one
from tests.strategies.models import MLP, llama, samples
from tests.strategies.ranks import Notes

warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft asks transformers
torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
SPECS = sys.argv[2:]
ddl = init("ddp", device="cpu")
notes = Notes(sys.argv[1], ddl.rank)
cells = iter(range(1, 1000))


def begin(strategy: str, **options: Any) -> None:
    number = next(cells)
    request = CellRequest(code="", cell=number, run=f"run{number}", name="", strategy=strategy, seed=1, **options)
    ddl.recorder.start_run(request.run)
    ddl.begin_cell(request)


def end() -> dict[str, Any]:
    drained = ddl.recorder.drain(final=True)
    ddl.end_cell()
    return drained


def saved_bytes(forward: Any) -> tuple[Any, int]:
    """What a forward gives, and the bytes of the tensors that autograd keeps for its backward, parameters aside."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    return output, sum(kept.values())


def warm_up_and_cosine(step: int) -> float:
    """Two steps of warm-up, ten in all."""
    return (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 8))


def several_options(strategy: str, *, checkpoint: bool, measured: bool = True) -> dict[str, Any]:
    """Accumulation, a schedule, activation checkpointing, and an end after three optimizer steps of many.

    `measured`: with the bytes of activations; the measuring hands AxoNN's overlap other tensors than it saved.
    """
    begin(strategy, steps=3, checkpoint_activations=checkpoint)
    with ddl.model_init():
        model = llama(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine)
    loader = DataLoader(samples("llama", 8 * 20), batch_size=8, shuffle=True)
    model, optimizer, schedule, loader = ddl.prepare(model, optimizer, schedule, loader, accumulate=2)
    losses, norms, rates, kept = [], [], [], 0
    for _ in range(2):  # the second loop over the same loader makes no step more
        for batch in ddl.track(loader):
            output, size = saved_bytes(lambda: model(**batch)) if measured else (model(**batch), 0)  # noqa: B023
            kept = max(kept, size)
            losses.append(float(ddl.all_reduce_mean(output.loss.detach())))
            rates.append(optimizer.param_groups[0]["lr"])
            ddl.backward(output.loss)
            norm = ddl.step(max_norm=1.0)
            if norm is not None:
                norms.append(float(norm))
    told = end()
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "kept": kept,
        "recorded": [point.value for point in told["points"] if point.name == "grad norm"],
        "progress": [told["progress"].step, told["progress"].total],
        "tokens a second": told["progress"].tokens_per_second,
    }


def precision(strategy: str, bits: str) -> dict[str, Any]:
    """A few steps in another precision."""
    begin(strategy, precision=bits)
    with ddl.model_init():
        model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(samples("mlp", 8) * 5, batch_size=8)
    model, optimizer, loader = ddl.prepare(model, optimizer, loader)
    losses = []
    for batch in ddl.track(loader):
        loss = model(**batch).loss
        losses.append(float(ddl.all_reduce_mean(loss.detach().float())))
        ddl.backward(loss)
        ddl.step()
    dtype = str(ddl.full_state_dict(model)["head.weight"].dtype)
    end()
    return {"losses": losses, "dtype": dtype}


def compiled(strategy: str, how: str) -> dict[str, Any]:
    """A compiled model; `aot_eager` compiles as the default does, up to the C++ compiler."""
    begin(strategy)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with ddl.model_init():
        model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "torch.compile":
        model = torch.compile(model, backend="aot_eager")
    elif how == "Module.compile":
        model.compile(backend="aot_eager")
    loader = DataLoader(samples("mlp", 24), batch_size=8)
    model, optimizer, loader = ddl.prepare(model, optimizer, loader)
    losses = []
    for batch in ddl.track(loader):
        loss = model(**batch).loss
        losses.append(float(ddl.all_reduce_mean(loss.detach())))
        ddl.backward(loss)
        ddl.step()
    names = list(ddl.full_state_dict(model))
    graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    said = [note for note in end()["notes"] if "compile" in note]
    return {
        "losses": losses,
        "names": names,
        "graphs": graphs,
        "notes": said,
        "class": type(ddl.unwrap(model)).__name__,
    }


# Adapters


CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def answers(count: int) -> list[dict[str, list[int]]]:
    """Rows of prompts and answers of very different lengths."""
    generator = torch.Generator().manual_seed(11)
    rows = []
    for number in range(count):
        prompt, answer = 2 + number % 3, 1 + (number * 5) % 12
        tokens = torch.randint(1, 64, (prompt + answer,), generator=generator).tolist()
        rows.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return rows


def with_adapter(seed: int, **options: Any) -> Any:
    """The base model of the cell's seed, with an adapter whose weights come from `seed`."""
    with ddl.model_init():
        base = llama(tied=True)
    with ddl.model_init(seed=seed):
        return get_peft_model(base, LoraConfig(**(CONFIG | options)))


def prepared_adapter(seed: int) -> tuple[Any, Any]:
    model = with_adapter(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loader = DataLoader(answers(8 * 3), batch_size=8, shuffle=True, collate_fn=Padding(0))
    model, _, loader = ddl.prepare(model, optimizer, loader)
    return model, loader


def train_adapter(model: Any, loader: Any) -> dict[str, list[float]]:
    """Losses as means over all tokens of the global batch, and over the ranks' own means; norms."""
    losses, unweighted, norms = [], [], []
    for batch in ddl.track(loader):
        loss, tokens = model(**batch).loss, answer_tokens(batch)
        total = ddl.all_reduce_mean(loss.detach() * tokens) / ddl.all_reduce_mean(tokens.float())
        losses.append(float(total))
        unweighted.append(float(ddl.all_reduce_mean(loss.detach())))
        ddl.backward(loss, weight=tokens)
        norms.append(float(ddl.step(max_norm=1.0)))
    return {"losses": losses, "unweighted": unweighted, "norms": norms}


def adapter(strategy: str, start: Path, folder: Path, *, writes: bool = True) -> dict[str, Any]:
    """Load an adapter, train it on unequal shards, save it alone; what plain peft reads there is the trained model."""
    begin(strategy)
    model, loader = prepared_adapter(seed=5)
    if writes:
        ddl.load_adapter(start)
        before = ddl.full_state_dict(model)
    else:  # in a process that reads what rank 0 has written
        before = weights_of(start)
        ddl.load_full_state_dict(model, before)
    found: dict[str, Any] = train_adapter(model, loader)
    with torch.no_grad():  # a sharded model gathers for it, and is whole for whoever asks next
        rows = Padding(0)(answers(8))
        found["evaluated"] = float(model(**rows).loss)
    state = ddl.full_state_dict(model)
    found |= {
        "frozen moved": [name for name in state if "lora_" not in name and not torch.equal(state[name], before[name])],
        "adapter stood still": [name for name in state if "lora_" in name and torch.equal(state[name], before[name])],
    }
    if writes:
        found["folder"] = str(ddl.save_adapter(folder))
        found["refused"] = refusals(start)
        if ddl.world.rank == 0:
            found["read"] = differences(folder, state)
        ddl.save(folder / "whole")
    end()
    return found


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Whole weights of the model with an adapter of a folder, in plain peft."""
    torch.manual_seed(1)
    model = PeftModel.from_pretrained(llama(tied=True), folder)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differences(folder: Path, state: dict[str, torch.Tensor]) -> list[str]:
    """Names of files and weights that are not as they must be, for plain peft."""
    read = weights_of(folder)
    files = {path.name for path in folder.iterdir()} ^ {"adapter_config.json", "adapter_model.safetensors"}
    return [*files, *(state.keys() ^ read.keys()), *(name for name in read if not torch.equal(state[name], read[name]))]


def refusals(start: Path) -> list[str]:
    """One line each: no adapter there, and one of another rank."""
    said = []
    for path in (FOLDER / "nowhere", start / "wider"):
        try:
            ddl.load_adapter(path)
        except DDLError as error:
            said.append(str(error).replace(str(FOLDER), ""))
    return said


def write_start(folder: Path) -> None:
    """An adapter whose weights are all away from where a new one begins, and beside it one of rank 8."""
    with ddl.model_init(seed=9):
        for path, rank in ((folder, 4), (folder / "wider", 8)):
            model = with_adapter(3, r=rank)
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.data.normal_(std=0.2)
            model.save_pretrained(path)


start = FOLDER / "start"
with world_of_one():
    begin("single")
    if ddl.world.rank == 0:
        write_start(start)
    end()
ddl.barrier()
with world_of_one():
    one = {
        "several options": several_options("single", checkpoint=False),
        "32": precision("single", "32"),
        "compiled": compiled("single", "not"),
        "compiled torch.compile": compiled("single", "torch.compile"),
        "adapter": adapter("single", start, FOLDER / "single", writes=False),
    }
    notes.write("single", one)
for spec in SPECS:
    notes.write(f"{spec} several options", several_options(spec, checkpoint=True))
    for bits in ("bf16-mixed", "bf16-true"):
        notes.write(f"{spec} {bits}", precision(spec, bits))
    for how in ("torch.compile", "Module.compile"):
        notes.write(f"{spec} {how}", compiled(spec, how))
    notes.write(f"{spec} adapter", adapter(spec, start, FOLDER / spec.replace(":", "-")))
overlapped = several_options("axonn:1x1x2,overlap=1", checkpoint=True, measured=False)
notes.write("overlapped several options", overlapped)
notes.write("config", json.loads((FOLDER / SPECS[0].replace(":", "-") / "adapter_config.json").read_text()))
ddl.close()
