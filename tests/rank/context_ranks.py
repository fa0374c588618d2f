"""Run on each of two ranks: what the context promises about ranks together."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddl_magics.errors import DDLError
from ddl_magics.protocol import CellRequest
from ddl_magics.rank import group
from ddl_magics.rank.alone import world_of_one
from ddl_magics.rank.context import init
from tests.strategies.ranks import Notes

torch.set_num_threads(1)

ddl = init("ddp", device="cpu")
notes = Notes(sys.argv[1], ddl.rank)
cells = iter(range(1, 1000))


def begin(strategy: str = "ddp", **options: Any) -> None:
    """Begin a cell as the notebook would."""
    number = next(cells)
    request = CellRequest(code="", cell=number, run=f"run{number}", name="", strategy=strategy, **options)
    ddl.recorder.start_run(request.run)
    ddl.begin_cell(request)


class Numbers(Dataset):
    """Sample i is a vector made from i, its target a number made from i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(4, generator=generator),
            "y": torch.randn(1, generator=generator),
            "i": torch.tensor(index),
        }


class Stream(IterableDataset):
    """As many numbers as it is told."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(torch.arange(self.length, dtype=torch.float32))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def build(length: int, batch_size: int, **options: Any) -> tuple[Any, Any, Any]:
    with ddl.model_init():
        model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Numbers(length), batch_size=batch_size, shuffle=True)
    return ddl.prepare(model, optimizer, loader, **options)


def train(length: int = 23, batch_size: int = 5, epochs: int = 2, **options: Any) -> dict[str, Any]:
    """Train, and say the global loss of every batch and the weights at the end."""
    model, _optimizer, loader = build(length, batch_size, **options)
    losses, norms = [], []
    for batch in ddl.track(loader, epochs=epochs):
        loss = ((model(batch["x"]) - batch["y"]) ** 2).mean()
        ddl.backward(loss)
        norms.append(ddl.step(max_norm=1.0))
        losses.append(loss.item())
    points = ddl.recorder.drain()["points"]
    weighed = torch.tensor([[point.value * point.weight, point.weight] for point in points if point.name == "loss"])
    dist.all_reduce(weighed)
    return {
        "losses": (weighed[:, 0] / weighed[:, 1]).tolist(),
        "acted": [norm is not None for norm in norms],
        "weights": [value.tolist() for value in model.state_dict().values()],
    }


def check_losses_and_weights() -> dict[str, Any]:
    """23 samples by 5: the last batch of each epoch has 3, and 1 where a batch of 2 is split over two ranks."""
    found = {}
    for name, options in {"plain": {}, "accumulate": {"accumulate": 3}, "ones": {"length": 5, "batch_size": 2}}.items():
        begin("ddp")
        found[name] = {"ddp": train(**options)}
        begin("single")
        if ddl.world.rank == 0:
            with world_of_one():
                found[name]["single"] = train(**options)
    begin("ddp")
    return found


def check_token_weights() -> list[float]:
    """Gradient of a mean over 1 + 3 tokens that two ranks share unevenly."""
    begin()
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = ddl.prepare(model, optimizer)
    tokens = torch.tensor([[1.0]]) if ddl.rank == 0 else torch.tensor([[2.0], [3.0], [4.0]])
    before = next(iter(model.state_dict().values())).clone()
    ddl.backward(model(tokens).mean(), weight=len(tokens))
    ddl.step()
    return (before - next(iter(model.state_dict().values()))).flatten().tolist()


def check_unequal_streams_end_together() -> dict[str, Any]:
    begin()
    loader = ddl.prepare(DataLoader(Stream(7 if ddl.rank == 0 else 4), batch_size=2))
    seen = [batch.tolist() for batch in ddl.track(loader)]
    return {"batches": len(seen), "notes": ddl.recorder.drain()["notes"]}


def check_equal_streams_end_quietly() -> dict[str, Any]:
    begin()
    loader = ddl.prepare(DataLoader(Stream(4), batch_size=2))
    return {"batches": len(list(ddl.track(loader, epochs=2))), "notes": ddl.recorder.drain()["notes"]}


def check_metrics_have_no_sample_twice() -> dict[str, Any]:
    begin()
    loader = ddl.prepare(DataLoader(Numbers(11), batch_size=2))
    seen = []
    for batch in ddl.track(loader):
        seen += ddl.gather_for_metrics({"i": batch["i"]})["i"].tolist()
    return {"seen": seen, "scalars": ddl.gather_for_metrics(torch.tensor(float(ddl.rank))).tolist()}


def check_words_between_ranks() -> dict[str, Any]:
    begin()
    ragged = ddl.all_gather(torch.arange(ddl.rank + 2).reshape(1, -1))
    return {
        "tensors": [value.tolist() for value in ragged],
        "objects": ddl.all_gather({"rank": ddl.rank}),
        "mean": ddl.all_reduce_mean(float(ddl.rank)),
        "mean_of_tensor": ddl.all_reduce_mean(torch.tensor([ddl.rank, 2 * ddl.rank])).tolist(),
    }


def check_first_goes_first() -> dict[str, Any]:
    begin()
    ddl.barrier()
    with ddl.first():
        entered = time.time()
        if ddl.rank == 0:
            time.sleep(0.3)
        left = time.time()
    times = ddl.all_gather((entered, left))
    with ddl.first(local=True):
        local = time.time()
        if ddl.rank == 0:
            time.sleep(0.2)
    return {"waited": times[1][0] >= times[0][1], "local": ddl.all_gather(local)}


def check_first_that_fails_frees_the_others() -> str:
    begin()
    try:
        with ddl.first():
            if ddl.rank == 0:
                Path("/no/such/corpus").read_text()
    except (OSError, DDLError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def check_printing_is_rank_zero_s() -> None:
    begin()
    ddl.print(f"printed by rank {ddl.world.rank}", flush=True)


def check_second_init_is_a_noted_no_op() -> dict[str, Any]:
    begin()
    before = dist.distributed_c10d._get_default_group()
    dist.init_process_group("gloo")
    dist.init_process_group(backend="gloo", init_method="env://", world_size=2, rank=ddl.rank)
    return {"same": before is dist.distributed_c10d._get_default_group(), "notes": ddl.recorder.drain()["notes"]}


def check_init_of_another_size_is_one_line() -> str:
    begin()
    try:
        dist.init_process_group("gloo", world_size=4, rank=ddl.rank)
    except DDLError as error:
        return str(error)
    return "passed"


def check_program_can_destroy_and_init_again() -> list[float]:
    begin()
    sums = []
    for _ in range(3):
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        value = torch.ones(1)
        dist.all_reduce(value)
        sums.append(value.item())
    return sums


def check_torch_s_own_init_finds_a_store() -> float:
    """A library that took hold of torch's function before us."""
    begin()
    dist.destroy_process_group()
    group._torch_init("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def check_group_that_a_cell_destroyed_comes_back() -> dict[str, Any]:
    begin()
    model, _optimizer, _ = build(4, 2)
    dist.destroy_process_group()
    begin()
    before = model.state_dict()
    ddl.backward(model(torch.ones(1, 4)).mean(), model=model)
    ddl.step(model=model)
    went_on = any(not torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    begin()
    return {"mean": ddl.all_reduce_mean(float(ddl.rank)), "went on": went_on, "losses": train()["losses"]}


def check_world_of_one() -> dict[str, Any]:
    """Rank 0 runs collectives alone, destroys "the" group and makes it again, while rank 1 stands by."""
    begin("single")
    found: dict[str, Any] = {}
    held = dist.new_group([0, 1])
    if ddl.world.rank == 0:
        with world_of_one():
            value = torch.ones(1)
            dist.all_reduce(value)
            dist.init_process_group("gloo")
            extra = dist.new_group([0])
            dist.barrier(extra)
            found["inside"] = [dist.get_rank(), dist.get_world_size(), os.environ["WORLD_SIZE"], ddl.world_size]
            dist.destroy_process_group()
            found["destroyed"] = not dist.is_initialized()
            dist.init_process_group("gloo")
            found["again"] = dist.get_world_size()
            ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
            ddp(torch.ones(1, 2)).sum().backward()
    begin()
    value = torch.ones(1)
    dist.all_reduce(value, group=held)
    later = dist.new_group([0, 1])
    dist.all_reduce(value, group=later)
    dist.destroy_process_group(held)
    dist.destroy_process_group(later)
    return found | {"after": value.item(), "world": [dist.get_world_size(), os.environ["WORLD_SIZE"]]}


def check_nothing_leaks() -> dict[str, Any]:
    """Groups, threads of Python and of the process after ten worlds of one, ten rebuilds and ten models."""
    begin()

    def count() -> list[int]:
        tables = dist.distributed_c10d._world
        return [
            len(tables.pg_map),
            threading.active_count(),
            len(list(Path("/proc/self/task").iterdir())),
            len(ddl._models.live()),
        ]

    train(length=4)
    before = count()
    for _ in range(10):
        with world_of_one():
            pass
        group.reopen_group()
        begin()
        train(length=4)
    return {"before": before, "after": count()}


def check_variables() -> dict[str, str | None]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    return {name: os.environ.get(name) for name in (*names, "ACCELERATE_USE_CPU", "DS_ACCELERATOR")}


def check_modules() -> list[str]:
    return [name for name in ("IPython", "ipyparallel", "mpi4py", "ipykernel") if name in sys.modules]


def check_where_am_i() -> list[Any]:
    begin()
    return [
        ddl.rank,
        ddl.world_size,
        ddl.local_rank,
        ddl.local_world_size,
        ddl.node_rank,
        str(ddl.device),
        ddl.strategy,
    ]


for name, check in list(globals().items()):
    if name.startswith("check_"):
        started = time.time()
        notes.write(name.removeprefix("check_"), check())
        print(f"[{ddl.world.rank}] {name} {time.time() - started:.2f} s", flush=True)
ddl.close()
notes.write(
    "closed", [dist.is_initialized(), os.environ.get("WORLD_SIZE"), dist.init_process_group is group._torch_init]
)
