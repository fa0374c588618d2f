"""Run on each of two ranks: programs of other libraries as their own documentation writes them, in one world."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from typing import Any

import torch

from ddl_magics.rank.context import init
from tests.strategies.ranks import Notes

torch.set_num_threads(1)
ddl = init("ddp", device="cpu")
notes = Notes(sys.argv[1], ddl.rank)


def mean_of_rank() -> float:
    """0.5 in a world of two."""
    import torch.distributed as dist

    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def check_ddp() -> dict[str, Any]:
    import os

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(rank))).sum().backward()
    return {"world": size, "gradient": model.module.weight.grad.flatten().tolist(), "mean": mean_of_rank()}


def check_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.arange(16.0).reshape(8, 2), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    gathered = accelerator.gather(torch.tensor([accelerator.process_index]))
    return {"world": accelerator.num_processes, "gathered": gathered.tolist(), "batches": len(loader)}


def check_trainer() -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    tokens = torch.arange(64).reshape(8, 8)
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=2, num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=samples)
        steps = trainer.train().global_step
    return {"world": arguments.world_size, "steps": steps, "rank": arguments.process_index}


def check_fabric() -> dict[str, Any]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    gathered = fabric.all_gather(torch.tensor(fabric.global_rank))
    return {"world": fabric.world_size, "gathered": gathered.tolist()}


def check_deepspeed() -> dict[str, Any]:
    import deepspeed

    deepspeed.init_distributed()
    model = torch.nn.Linear(2, 1)
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(torch.full((1, 2), float(ddl.rank))).sum())
    engine.step()
    found = {"world": deepspeed.comm.get_world_size(), "data_parallel": engine.dp_world_size}
    engine.destroy()
    return found


for name, check in list(globals().items()):
    if name.startswith("check_"):
        started = time.time()
        try:
            finding = check()
        except Exception:  # whatever it is, the tests show it
            finding = traceback.format_exc()
        notes.write(name.removeprefix("check_"), finding)
        print(f"[{ddl.world.rank}] {name} {time.time() - started:.2f} s", flush=True)
notes.write("afterwards", mean_of_rank())
