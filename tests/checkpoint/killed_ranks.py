"""Two ranks that save all the time, of which one or both are killed at a random moment; again and again.

Started as `killed_ranks.py FOLDER TIMES SEED`; writes findings.json there. Ranks are forked, since a start by MPI takes
seconds and a fork milliseconds. The first rank writes down each step whose save has returned.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ddl_magics.protocol import CellRequest, World
from ddl_magics.rank import group
from ddl_magics.rank.checkpoint import shares
from ddl_magics.rank.context import Context
from tests.checkpoint.small import prepare, train

ROUNDS = 10_000
"""Saves of a rank that nobody kills."""
SOON_S = 20.0
"""Seconds that a rank has to end after the other one is gone."""
OUTCOMES = {0: "came through", 3: "told an error"}


def rank_of_two(rank: int, port: int, folder: Path) -> None:
    """Go on from the latest checkpoint, and save after each epoch."""
    shares.SMALLEST = 64  # both write weights
    world = World(rank, 2, rank, 2)
    group.open_group(world, group.join_store("127.0.0.1", port))
    ddl = Context(world)
    ddl.begin_cell(CellRequest(code="", cell=1, run="run", name="", strategy="ddp"))
    model, _, _, loader = prepare(ddl)
    ddl.load(folder, model, resume="latest")
    for _ in range(ROUNDS):
        train(ddl, model, loader)
        step = ddl.save(folder, model, keep=2).name
        if rank == 0:
            (folder.parent / "returned").write_text(step)


def started(rank: int, port: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        rank_of_two(rank, port, folder)
    except Exception:
        os._exit(3)
    os._exit(0)


def ended(child: int) -> str:
    """How a rank ended; one that does not within `SOON_S` waits for ever."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "killed" if os.WIFSIGNALED(status) else OUTCOMES.get(os.WEXITSTATUS(status), "failed")
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def attempt(folder: Path, chance: random.Random) -> dict[str, Any]:
    """Let two ranks save, kill some of them, and load what is there."""
    returned = folder.parent / "returned"
    before = returned.read_text() if returned.exists() else ""
    store = group.serve()
    children = [started(rank, store.port, folder) for rank in range(2)]
    while not returned.exists() or returned.read_text() in {"", before}:  # they are at it
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.1))
    victims = chance.choice([[0], [1], [0, 1]])
    for rank in victims:
        os.kill(children[rank], signal.SIGKILL)
    outcomes = [ended(child) for child in children]
    ddl = Context(World(0, 1, 0, 1))
    ddl.begin_cell(CellRequest(code="", cell=1, run="run", name="", strategy="single"))
    model, *_ = prepare(ddl)
    loaded = ddl.load(folder, model)
    return {"victims": victims, "outcomes": outcomes, "loaded": loaded.step, "returned": returned.read_text()}


def main(home: Path, times: int, seed: int) -> None:
    torch.set_num_threads(1)
    folder = home / "run"
    folder.mkdir()
    chance = random.Random(seed)
    found = [attempt(folder, chance) for _ in range(times)]
    ddl = Context(World(0, 1, 0, 1))
    ddl.begin_cell(CellRequest(code="", cell=1, run="run", name="", strategy="single"))
    model, *_ = prepare(ddl)
    ddl.load(folder, model)
    ddl.save(folder, model, keep=1)
    (home / "findings.json").write_text(json.dumps({"kills": found, "left": sorted(p.name for p in folder.iterdir())}))


main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
