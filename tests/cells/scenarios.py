"""Cells in which one rank fails while others wait: what the notebook must show, and what must still work afterwards.

Each is run twice, through a kernel as a front end drives it and through nbclient. `W` in a cell stands for the rank
that fails.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

SETUP = """%%ddl
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(1)
class Broken(Slow):
    def __getitem__(self, index):
        raise OSError("no such sample")
everybody = list(range(world_size))
before = rank + 41"""

AFTER = "%%ddl\ntotal = torch.ones(3)\ndist.all_reduce(total)\nprint('kept', before - rank, 'sum', total[0].item())"


@dataclass(frozen=True)
class Scenario:
    """One cell that fails."""

    name: str
    code: str
    cause: str
    """What the first error is, as the last line says it."""
    freed: str
    """The collective that the others were freed from."""
    line: int
    """Where they were."""
    ranks: int = 1
    """The rank that fails."""

    def cell(self) -> str:
        return re.sub(r"\bW\b", str(self.ranks), f"%%ddl\n{self.code}")

    def by(self, rank: int) -> Scenario:
        return dataclasses.replace(self, name=f"{self.name}, rank {rank}", ranks=rank)


def are_here(text: str, world_size: int) -> bool:
    """Whether all ranks have printed `here`: in one line, or on a busy machine in several."""
    said = set()
    for label in re.findall(r"\[([\d,-]+)\] here", text):
        for part in label.split(","):
            first, _, last = part.partition("-")
            said |= set(range(int(first), int(last or first) + 1))
    return len(said) == world_size


def check_failure(scenario: Scenario, ename: str, text: str) -> None:
    """The true cause comes first, the freed ranks after it, with their place; nothing of gloo's own words."""
    assert ename == "CellError", text
    last = text.strip().splitlines()[-1]
    assert f"rank {scenario.ranks} failed in line" in last, text
    assert scenario.cause in last, text
    assert f"in {scenario.freed}, line {scenario.line}; variables are kept" in last, text
    assert last.index(scenario.cause) < last.index("freed:")
    assert "Connection closed by peer" not in text


def check_after(text: str, world_size: int) -> None:
    """All variables are there, every rank takes part, and the sum is right."""
    assert f"[0-{world_size - 1}] kept 41 sum {float(world_size)}" in text, text


SCENARIOS = [
    Scenario("all_reduce", "if rank == W:\n    raise ValueError('boom')\ndist.all_reduce(torch.ones(3))",
             "ValueError: boom", "all_reduce", 4),
    Scenario("barrier", "if rank == W:\n    time.sleep(0.5)\n    1 / 0\ndist.barrier()",
             "ZeroDivisionError: division by zero", "barrier", 5),
    Scenario("objects", "if rank == W:\n    {}['key']\ndist.all_gather_object([None] * world_size, 'x' * 1000)",
             "KeyError: 'key'", "all_gather", 4),
    Scenario("a message", "if rank == W:\n    raise IndexError('not sent')\ndist.recv(torch.ones(3), W)",
             "IndexError: not sent", "recv", 4),
    Scenario("a message waited for later", "work = dist.irecv(torch.ones(3), W) if rank != W else None\n"
             "if rank == W:\n    raise IndexError('not sent')\nwork.wait()", "IndexError: not sent", "a collective", 5),
    Scenario("a subgroup", "group = dist.new_group(everybody)\nif rank == W:\n    raise TypeError('in a group')\n"
             "dist.broadcast(torch.ones(3), src=W, group=group)", "TypeError: in a group", "broadcast", 5),
    Scenario("making a group", "if rank == W:\n    raise RuntimeError('no group')\ngroup = dist.new_group(everybody)",
             "RuntimeError: no group", "new_group", 4),
    Scenario("a call of the context", "if rank == W:\n    raise LookupError('lost')\nddl.barrier()",
             "LookupError: lost", "ddl.barrier", 4),
    Scenario("an error made of an error", "if rank == W:\n    raise ValueError('the cause')\ntry:\n"
             "    dist.barrier()\nexcept RuntimeError as error:\n    raise OSError('training failed') from error",
             "ValueError: the cause", "barrier", 5),
    Scenario("out of memory", "if rank == W:\n    raise torch.OutOfMemoryError('CUDA out of memory')\ndist.barrier()",
             "OutOfMemoryError: CUDA out of memory", "barrier", 4),
    Scenario("an autograd hook under DDP", "model = DistributedDataParallel(torch.nn.Linear(64, 64))\n"
             "def hook(gradient):\n    raise ArithmeticError('in backward')\nif rank == W:\n"
             "    model.module.weight.register_hook(hook)\nmodel(torch.ones(4, 64)).sum().backward()",
             "ArithmeticError: in backward", "all_reduce", 7),
    Scenario("workers of a DataLoader alive", "batches = iter(DataLoader(Slow(), num_workers=2))\nnext(batches)\n"
             "if rank == W:\n    raise ValueError('beside workers')\ndist.all_reduce(torch.ones(3))",
             "ValueError: beside workers", "all_reduce", 6),
    Scenario("in a worker of a DataLoader", "if rank == W:\n    next(iter(DataLoader(Broken(), num_workers=1)))\n"
             "dist.barrier()", "OSError: Caught OSError in DataLoader worker process 0.", "barrier", 4),
]  # fmt: skip
