"""Run on each rank: what single strategies promise, measured on strategy objects without the context."""

from __future__ import annotations

import gc
import hashlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from ddl_magics.errors import DDLError
from ddl_magics.rank import group, world
from ddl_magics.strategies import spec
from ddl_magics.strategies.base import Training
from tests.strategies.models import MLP, Layers, llama, samples
from tests.strategies.ranks import Notes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.strategies.base import Prepared, Strategy

ALL = ("ddp", "zero:1", "zero:2", "zero:3", "fsdp")
SHARDED = ("zero:1", "zero:2", "zero:3")
OFFLOAD = ("zero:1,offload=cpu", "zero:2,offload=cpu", "zero:3,offload=cpu,offload_param=cpu", "fsdp,offload=cpu")
torch.set_num_threads(1)
here = world.from_environment("cpu")
folder, arguments = sys.argv[1], sys.argv[2:]
group.open_group(here)
notes = Notes(folder, here.rank)


def load(text: str) -> Strategy:
    return spec.load(spec.parse(text), here)


def batch(strategy: Strategy, model: str = "mlp", size: int = 8) -> dict[str, torch.Tensor]:
    """Slice of this rank of one fixed global batch."""
    all_samples = samples(model, size)
    mine = all_samples[strategy.data_rank :: strategy.data_size]
    return {key: torch.stack([sample[key] for sample in mine]) for key in mine[0]}


def train(prepared: Prepared, inputs: dict[str, torch.Tensor], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = prepared(**inputs).loss
        prepared.backward(loss, boundary=True)
        prepared.step(1.0)
        losses.append(float(loss.detach()))
    return losses


def digest(state: dict[str, torch.Tensor]) -> str:
    """Equal for equal weights, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def said(action: Callable[..., Any], *given: Any) -> str:
    """The one line that a user reads; empty where nothing was refused."""
    try:
        action(*given)
    except DDLError as error:
        return str(error)
    return ""


# Checks: each returns what JSON can hold.


def memory_shares() -> dict[str, Any]:
    """Bytes by kind between two backwards of an accumulation, where gradients are what a rank must keep.

    In `equal layers` the borders of shards lie between parameters, in `a head` within one.
    """
    found: dict[str, Any] = {"equal layers": {}, "a head": {}}
    for text in ("single", *ALL):
        for shape, model_of in (("equal layers", Layers), ("a head", MLP)):
            strategy = load(text)
            torch.manual_seed(0)
            with strategy.model_init():
                model = model_of()
            prepared = strategy.prepare(model, torch.optim.AdamW(model.parameters()), Training(accumulate=2))
            if text != "single" or here.rank == 0:
                inputs = batch(strategy)
                prepared.backward(prepared(**inputs).loss, boundary=True)
                prepared.step(None)
                peak = prepared.looks.peak()
                prepared.backward(prepared(**inputs).loss, boundary=False)
                theory = spec.shares(strategy.spec, here.world_size)
                found[shape][text] = {"measured": prepared.memory(), "peak": peak, "theory": theory}
            prepared.close()
            strategy.close()
    return found


def model_init_gives_the_weights_of_one_process() -> dict[str, Any]:
    torch.manual_seed(3)
    alone = digest(load("single").full_state_dict(llama(tied=True)))
    found: dict[str, Any] = {"one process": alone, "shapes": [list(p.shape) for p in llama(tied=True).parameters()]}
    for text in ALL:
        strategy = load(text)
        torch.manual_seed(3)
        with strategy.model_init():
            model = llama(tied=True)
        before = digest(strategy.full_state_dict(model))
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        shapes = [list(parameter.shape) for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters())
        prepared = strategy.prepare(model, optimizer, Training())
        found[text] = {"before": before, "after": digest(prepared.full_state_dict()), "tied": tied, "shapes": shapes}
        prepared.close()
        strategy.close()
    return found


def prepare_gives_every_rank_the_weights_of_rank_zero() -> dict[str, Any]:
    found = {}
    for text in ALL:
        strategy = load(text)
        torch.manual_seed(100 + here.rank)
        model = MLP()
        own = digest(load("single").full_state_dict(model))
        prepared = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), Training())
        found[text] = {"own": own, "prepared": digest(prepared.full_state_dict())}
        prepared.close()
        strategy.close()
    return found


def whole_weights_go_in_and_come_out() -> dict[str, Any]:
    torch.manual_seed(1)
    given = {name: tensor.clone() for name, tensor in llama(tied=True).state_dict().items()}
    found: dict[str, Any] = {"given": digest(given)}
    for text in ("single", *ALL):
        for precision in ("32", "bf16-true"):
            strategy = load(text)
            torch.manual_seed(2)
            with strategy.model_init():
                model = llama(tied=True)
            strategy.load_full_state_dict(model, given)
            before = digest(strategy.full_state_dict(model))
            prepared = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), Training(precision))
            loaded = {name: tensor + 1 for name, tensor in given.items() if name != "lm_head.weight"}
            prepared.load_full_state_dict(loaded)
            if text != "single":  # a step of length 0 writes back what the optimizer takes for the weights
                train(prepared, batch(strategy, "llama"), 1)
            after = prepared.full_state_dict()
            wanted = {name: (tensor + 1).to(after[name].dtype) for name, tensor in given.items()}
            found[f"{text} {precision}"] = {
                "before": before,
                "loaded": digest(after) == digest(wanted),
                "dtype": str(after["lm_head.weight"].dtype),
                "missing": said(prepared.load_full_state_dict, {}),
                "misshaped": said(prepared.load_full_state_dict, given | {"model.norm.weight": torch.ones(3)}),
                "unexpected": said(prepared.load_full_state_dict, given | {"other": torch.ones(3)}),
            }
            prepared.close()
            strategy.close()
    return found


def the_users_optimizer_drives_the_step() -> dict[str, Any]:
    """Two groups with their own settings, a frozen weight, and a schedule that sets the rate to 0 from step 2 on."""
    found = {}
    for text in ("single", *ALL):
        strategy = load(text)
        torch.manual_seed(0)
        with strategy.model_init():
            model = MLP()
        model.head.bias.requires_grad_(requires_grad=False)
        groups = [{"params": list(model.body.parameters()), "lr": 0.1}, {"params": list(model.head.parameters())}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.0)
        prepared = strategy.prepare(model, optimizer, Training())
        digests, weights = [], {}
        if text != "single" or here.rank == 0:
            for _ in range(4):
                train(prepared, batch(strategy), 1)
                schedule.step()
                weights = prepared.full_state_dict()
                digests.append(digest(weights))
        found[text] = {
            "digests": digests,
            "same optimizer": prepared.optimizer is optimizer,
            "weights": {name: tensor.double().norm().item() for name, tensor in weights.items()},
        }
        prepared.close()
        strategy.close()
    return found


def low_precision_trains() -> dict[str, Any]:
    found = {}
    for text in ("single", *ALL):
        for precision in ("bf16-mixed", "bf16-true"):
            strategy = load(text)
            torch.manual_seed(0)
            with strategy.model_init():
                model = MLP()
            prepared = strategy.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), Training(precision))
            if text != "single" or here.rank == 0:
                losses = train(prepared, batch(strategy), 10)
                weights = prepared.full_state_dict()["head.weight"].dtype
                found[f"{text} {precision}"] = {"losses": losses, "dtype": str(weights)}
            prepared.close()
            strategy.close()
    return found


def two_models_train_side_by_side() -> dict[str, Any]:
    """Alternating, as a GAN's two do; and their weights are those of training each by itself."""
    found = {}
    for text in ALL:
        strategy = load(text)
        made = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            with strategy.model_init():
                model = MLP()
            made.append(strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Training()))
        for _ in range(3):
            for prepared in made:
                train(prepared, batch(strategy), 1)
        found[text] = [digest(prepared.full_state_dict()) for prepared in made]
        for prepared in made:
            prepared.close()
        alone = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            with strategy.model_init():
                model = MLP()
            prepared = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Training())
            train(prepared, batch(strategy), 3)
            alone.append(digest(prepared.full_state_dict()))
            prepared.close()
        found[f"{text} alone"] = alone
        strategy.close()
    return found


def a_second_prepare() -> dict[str, Any]:
    found = {}
    for text in ALL:
        strategy = load(text)
        with strategy.model_init():
            model = MLP()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        prepared = strategy.prepare(model, optimizer, Training())
        first = train(prepared, batch(strategy), 3)
        refused = said(strategy.prepare, model, optimizer, Training())
        prepared.close()
        again = torch.optim.AdamW(model.parameters(), lr=1e-2)
        prepared = strategy.prepare(model, again, Training())
        second = train(prepared, batch(strategy), 3)
        held = sum(len(group["params"]) for group in optimizer.param_groups)
        prepared.close()
        found[text] = {"refused": refused, "losses": first + second, "held": held, "of": len(list(model.parameters()))}
        strategy.close()
    for text, other in (("zero:3", "ddp"), ("fsdp", "zero:3")):
        sharded = load(text)
        with sharded.model_init():
            model = MLP()
        sharded.prepare(model, None, Training()).close()
        found[f"{text} foreign"] = said(load(other).prepare, model, None, Training())
        sharded.close()
    return found


def optimizers_that_shards_would_mislead() -> dict[str, Any]:
    found = {}
    strategy = load("fsdp")
    model = MLP()
    found["fsdp"] = [said(strategy.prepare, model, torch.optim.Adafactor(model.parameters()), Training())]
    for text in SHARDED:
        strategy = load(text)
        model = MLP()
        stepped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(**batch(strategy)).loss.backward()
        stepped.step()
        frozen = MLP()
        frozen.head.requires_grad_(requires_grad=False)
        groups = [{"params": frozen.body.parameters()}, {"params": frozen.head.parameters()}]
        found[text] = [
            said(strategy.prepare, model, torch.optim.Adafactor(model.parameters()), Training()),
            said(strategy.prepare, model, stepped, Training()),
            said(strategy.prepare, frozen, torch.optim.SGD(groups, lr=0.1), Training()),
        ]
        strategy.close()
    return found


def evaluation_without_an_optimizer() -> dict[str, Any]:
    found = {}
    for text in ("single", *ALL):
        strategy = load(text)
        torch.manual_seed(0)
        with strategy.model_init():
            model = MLP()
        prepared = strategy.prepare(model, None, Training())
        with torch.no_grad():
            loss = prepared(**batch(load("single"))).loss
        found[text] = {"loss": float(loss), "step": said(prepared.step, None)}
        prepared.close()
        strategy.close()
    return found


def offload_trains_as_without() -> dict[str, Any]:
    found = {}
    for text in ("zero:2", *OFFLOAD):
        strategy = load(text)
        torch.manual_seed(0)
        with strategy.model_init():
            model = MLP()
        prepared = strategy.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), Training(accumulate=2))
        inputs, losses = batch(strategy), []
        for _ in range(3):
            for boundary in (False, True):
                loss = prepared(**inputs).loss
                prepared.backward(loss / 2, boundary)
            losses.append(float(loss.detach()))
            norm = prepared.step(0.5)
        found[text] = {"losses": losses, "norm": float(norm), "memory": prepared.memory()}
        prepared.close()
        strategy.close()
    return found


def parameters_that_take_no_part() -> dict[str, Any]:
    class Branching(MLP):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            self.turn = not getattr(self, "turn", False)
            return super().forward(x if self.turn else x.detach() * 0 + 1, labels)

    strategy = load("ddp,find_unused_parameters=true")
    torch.manual_seed(0)
    model = Branching()
    model.extra = torch.nn.Linear(32, 32)
    prepared = strategy.prepare(model, torch.optim.AdamW(model.parameters(), weight_decay=0.5), Training())
    before = digest(prepared.module.extra.state_dict())
    losses = train(prepared, batch(strategy), 4)
    after = digest(prepared.module.extra.state_dict())
    prepared.close()
    strategy.close()
    return {"losses": losses, "extra unchanged": before == after}


def memory_is_read_from_another_thread() -> dict[str, Any]:
    found = {}
    for text in ALL:
        strategy = load(text)
        with strategy.model_init():
            model = MLP()
        prepared = strategy.prepare(model, torch.optim.AdamW(model.parameters()), Training())
        stop, read, raised = threading.Event(), [], []
        train(prepared, batch(strategy), 1)
        mine = prepared.memory()

        def sample(prepared: Prepared = prepared) -> None:
            while not stop.wait(0.001):  # noqa: B023 - joined before the next strategy
                try:
                    read.append(prepared.memory())  # noqa: B023
                except Exception as error:
                    raised.append(repr(error))  # noqa: B023
                    return

        thread = threading.Thread(target=sample)
        thread.start()
        while not read and not raised:
            time.sleep(0.001)
        train(prepared, batch(strategy), 10)
        stop.set()
        thread.join()
        prepared.close()
        found[text] = {"raised": raised, "read": len(read), "as the last look": read[0] == mine}
        strategy.close()
    return found


def counted() -> dict[str, float]:
    gc.collect()
    objects = gc.get_objects()
    tensors = [thing for thing in objects if issubclass(type(thing), torch.Tensor)]
    process = psutil.Process()
    return {
        "python threads": threading.active_count(),
        "threads": process.num_threads(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "modules": sum(issubclass(type(thing), torch.nn.Module) for thing in objects),
        "tensors": len(tensors),
        "tensor bytes": sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()),
        "resident": process.memory_info().rss,
    }


def strategies_follow_one_another_without_a_leak() -> dict[str, Any]:
    """Each round is another order of all strategies."""
    texts = ["single", *ALL]
    rounds = []
    linear = torch.nn.functional.linear
    for number in range(4):
        for text in texts[number:] + texts[:number]:
            strategy = load(text)
            torch.manual_seed(0)
            with strategy.model_init():
                model = MLP(width=256, depth=4)
            prepared = strategy.prepare(model, torch.optim.AdamW(model.parameters()), Training())
            if text != "single" or here.rank == 0:
                inputs = {"x": torch.randn(4, 256), "labels": torch.zeros(4, dtype=torch.long)}
                train(prepared, inputs, 2)
            prepared.close()
            strategy.close()
            del strategy, model, prepared
        rounds.append(counted())
    return {"rounds": rounds, "linear is torch's": torch.nn.functional.linear is linear}


def a_group_made_anew() -> dict[str, Any]:
    """Everything trains again after the default group was destroyed, also where nobody closed the strategies."""
    found = {}
    forgotten = [load(text) for text in ALL]
    with forgotten[3].model_init():
        model = MLP()
    lost = forgotten[3].prepare(model, torch.optim.AdamW(model.parameters()), Training())
    train(lost, batch(forgotten[3]), 1)
    group.reopen_group()
    lost.close()
    for strategy in forgotten:
        strategy.close()
    for text in ALL:
        strategy = load(text)
        torch.manual_seed(0)
        with strategy.model_init():
            model = MLP()
        prepared = strategy.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), Training())
        found[text] = train(prepared, batch(strategy), 3)
        prepared.close()
        strategy.close()
    return found


CHECKS = (
    memory_shares,
    model_init_gives_the_weights_of_one_process,
    prepare_gives_every_rank_the_weights_of_rank_zero,
    whole_weights_go_in_and_come_out,
    the_users_optimizer_drives_the_step,
    low_precision_trains,
    two_models_train_side_by_side,
    a_second_prepare,
    optimizers_that_shards_would_mislead,
    evaluation_without_an_optimizer,
    offload_trains_as_without,
    parameters_that_take_no_part,
    memory_is_read_from_another_thread,
    strategies_follow_one_another_without_a_leak,
    a_group_made_anew,
)

for check in CHECKS:
    if not arguments or check.__name__ in arguments:
        began = time.monotonic()
        notes.write(check.__name__, check())
        dist.barrier()
        notes.write(f"seconds of {check.__name__}", round(time.monotonic() - began, 1))
group.close_group()
