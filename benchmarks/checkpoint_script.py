"""On each rank: how long a checkpoint takes, in three ways, in turn. Started as `checkpoint_script.py STRATEGY TIMES`.

Rank 0 prints the medians as JSON. Every way writes the same whole state of model and optimizer and waits until it is
on the disk; each is read back by all ranks. The page cache holds what was just written, so that reading is from memory.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import ddl_magics

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS = ("ddl.save", "torch.save", "library")


def config() -> LlamaConfig:
    """About 100 MB of weights in fp32, three times that with AdamW's state."""
    return LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
        tie_word_embeddings=True,
    )  # fmt: skip


class Ways:
    """The same model, saved and loaded in each way; all are collectives."""

    def __init__(self, strategy: str) -> None:
        torch.set_num_threads(1)
        self.ddl = ddl_magics.init(strategy, device="cpu")
        with self.ddl.model_init():
            model = LlamaForCausalLM(config())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model, self.optimizer = self.ddl.prepare(model, optimizer)
        tokens = torch.zeros(1, 8, dtype=torch.long)
        self.ddl.backward(self.model(input_ids=tokens, labels=tokens).loss)
        self.ddl.step()
        self.prepared = self.ddl.prepared_models()[0].prepared
        self.sharded = strategy.partition(":")[0] in {"zero", "fsdp"}

    def save_ours(self, folder: Path) -> None:
        self.ddl.save(folder)

    def load_ours(self, folder: Path) -> None:
        self.ddl.load(folder)

    def save_torch(self, folder: Path) -> None:
        """Gather where it is sharded, and write on rank 0."""
        if self.sharded:
            entries = self.prepared.entries()
            state: Any = {entry[:2]: self.prepared.gather(entry, to=0) for entry in entries}
        else:
            state = {"model": self.ddl.unwrap(self.model).state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.ddl.rank == 0:
            with (folder / "checkpoint.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

    def load_torch(self, folder: Path) -> None:
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        if self.sharded:
            self.prepared.put((entry, state[entry[:2]]) for entry in self.prepared.entries())
        else:
            self.ddl.unwrap(self.model).load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    def save_library(self, folder: Path) -> None:
        """DeepSpeed's own under ZeRO, else torch.distributed.checkpoint: each rank writes what it holds."""
        if self.ddl.strategy.startswith("zero"):
            self.prepared.engine.save_checkpoint(folder, tag="one")
            for path in folder.rglob("*rank_*"):  # DeepSpeed leaves it to the system when this is on the disk
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            return
        model, optimizer = get_state_dict(self.ddl.unwrap(self.model), self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load_library(self, folder: Path) -> None:
        if self.ddl.strategy.startswith("zero"):
            self.prepared.engine.load_checkpoint(folder, tag="one")
            return
        module = self.ddl.unwrap(self.model)
        model, optimizer = get_state_dict(module, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(module, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def seconds(call: Callable[[Path], None], folder: Path) -> float:
    """From the moment that all ranks begin until all are through."""
    dist.barrier()
    began = time.perf_counter()
    call(folder)
    dist.barrier()
    return time.perf_counter() - began


def main(strategy: str, times: int) -> None:
    """Measure every way in turn."""
    warnings.simplefilter("ignore")
    ways = Ways(strategy)
    told: list[Any] = [tempfile.mkdtemp(prefix="ddl-bench-") if ways.ddl.rank == 0 else None]
    dist.broadcast_object_list(told)
    home = Path(told[0])
    taken: dict[str, list[float]] = defaultdict(list)
    calls = {
        "ddl.save": (ways.save_ours, ways.load_ours),
        "torch.save": (ways.save_torch, ways.load_torch),
        "library": (ways.save_library, ways.load_library),
    }
    for number in range(times + 1):
        for name, (save, load) in calls.items():
            folder = home / f"{name} {number}"
            if ways.ddl.rank == 0:
                folder.mkdir()
            took = seconds(save, folder), seconds(load, folder)
            if number:  # the first of each warms up
                taken[f"save {name}"].append(took[0])
                taken[f"load {name}"].append(took[1])
            if ways.ddl.rank == 0:
                shutil.rmtree(folder)
    if ways.ddl.rank == 0:
        shutil.rmtree(home)
        print(json.dumps({name: statistics.median(values) for name, values in taken.items()}))
    ways.ddl.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
