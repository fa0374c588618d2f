"""Run on each of two ranks: saves and loads that fail on one of them or on both, and what comes after.

Started as `failing_ranks.py FOLDER HOME [FULL READONLY]`: HOME is a folder on a disk, FULL one with a megabyte in all,
READONLY one that nobody can write.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from ddl_magics.errors import DDLError
from ddl_magics.rank.checkpoint import shares
from tests.checkpoint.training import Cells
from tests.strategies.models import llama
from tests.strategies.ranks import Notes

if TYPE_CHECKING:
    from collections.abc import Callable

CLONE_NEWNS = 0x20000

cells = Cells()
ddl = cells.ddl
rank = ddl.world.rank
notes = Notes(sys.argv[1], rank)
home = Path(sys.argv[2])
shares.SMALLEST = 4096  # both ranks write weights


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except DDLError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def names(folder: Path) -> list[str]:
    """What is in a folder, once both ranks are through."""
    ddl.barrier()
    found = sorted(path.name for path in folder.iterdir())
    ddl.barrier()
    return found


cells.begin("ddp", 1)
with ddl.model_init():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
model, optimizer, loader = ddl.prepare(model, optimizer, DataLoader(data, batch_size=4))


def train() -> float:
    """One epoch of two steps; the last loss."""
    for x in loader:
        loss = model(x).pow(2).mean()
        ddl.backward(loss)
        ddl.step()
    return loss.item()


def after(folder: Path) -> list[Any]:
    """What is left of a save that failed, and whether what was there before can be loaded."""
    here = {name: value.clone() for name, value in model.state_dict().items()}
    step = ddl.load(folder).step
    return [
        names(folder),
        (folder / "latest").read_text(),
        step,
        any(bool((here[n] != v).any()) for n, v in model.state_dict().items()),
    ]


train()
run = home / "run"
ddl.save(run)
notes.write("files", names(run / "step-2"))
train()

notes.write("paths", said(lambda: ddl.save(home / f"rank{rank}")))
notes.write("paths left", names(home))
notes.write("extra", said(lambda: ddl.save(run, what=(print if rank == 1 else 1))))

# One rank may write no large file: the error comes in the middle of a tensor, and only there.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
notes.write("one rank", said(lambda: ddl.save(run)))
if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
notes.write("one rank after", after(run))
notes.write("one rank goes on", [train() > 0, ddl.save(run, keep=1).name, names(run)])

# A file that only one rank reads is damaged.
damaged = run / "step-4" / "model-00002-of-00002.safetensors"
ddl.barrier()
if rank == 0:
    with damaged.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
notes.write("damaged", said(lambda: ddl.load(run)))
notes.write("missing", said(lambda: ddl.load(home / "none")))
notes.write("fewer", ddl.load(home / "none", resume="latest").step)

if len(sys.argv) > 3:
    full, readonly = Path(sys.argv[3]), Path(sys.argv[4])
    notes.write("full first", ddl.save(full / "run").name)
    train()
    notes.write("full", said(lambda: ddl.save(full / "run")))
    notes.write("full after", after(full / "run"))
    train()
    notes.write("full again", said(lambda: ddl.save(full / "run", keep=1)))
    ddl.barrier()
    if rank == 0:
        shutil.rmtree(full / "run")
    ddl.barrier()
    notes.write("full goes on", ddl.save(full / "run").name)
    notes.write("read-only", said(lambda: ddl.save(readonly / "run")))
    # Rank 1 gets another folder of the same name, as on a node with a disk of its own.
    shared = home / "shared"
    shared.mkdir(exist_ok=True)
    ddl.barrier()
    libc = ctypes.CDLL(None, use_errno=True)
    if rank == 1:
        libc.unshare(CLONE_NEWNS)
        libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
        libc.mount(b"tmpfs", os.fsencode(shared), b"tmpfs", 0, None)
    ddl.barrier()
    notes.write("not shared", said(lambda: ddl.save(shared)))
    ddl.barrier()
    notes.write("not shared left", sorted(path.name for path in shared.iterdir()))

cells.begin("ddp", 1)
language = ddl.prepare(llama(tied=True))
notes.write("sharded", names(ddl.save(home / "llama", language)))
weights = ddl.full_state_dict(language)
if rank == 0:
    torch.save(weights, home / "llama.pt")
ddl.close()
