"""Run on each rank: prepared models after a rank failed, the others were freed, and the process group was made anew.

Started as `recovery_ranks.py FOLDER CHECK...`; the tests judge what is found.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ddl_magics.errors import DDLError
from tests.strategies.models import MLP
from tests.strategies.ranks import Notes
from tests.strategies.recovery_bench import BrokenError, Trainee, batch, begin, census, culprit, ddl, recover

ALL = ("ddp", "zero:2", "zero:3", "axonn:2x1x1", "fsdp")


def said(action: Any) -> str:
    """The one line that a user reads; empty where nothing was refused."""
    try:
        action()
    except DDLError as error:
        return str(error)
    return ""


# Checks: each returns what JSON can hold.


def uninterrupted(steps: int, *trainee: Any) -> list[float]:
    one = Trainee(*trainee)
    for number in range(steps):
        one.step(number)
    return one.all_losses()


def goes_on(strategy: str, places: str, accumulate: str = "1", precision: str = "32") -> dict[str, Any]:
    """Training in which the culprit fails at every second step, each time at the next place."""
    one = Trainee(strategy, int(accumulate), precision)
    found: dict[str, Any] = {"told": {}, "made": {}, "raised": {}}
    number = 0
    for place in places.split(","):
        one.step(number)
        number += 1
        found["raised"][place] = one.breaks(number, place)
        told = recover()
        after = told["models"]["MLP"]
        one.forget_from(after)
        found["told"][place], found["made"][place] = told, after - number
        number = after
    one.step(number)
    found["losses"] = one.all_losses()
    del one
    found["expected"] = uninterrupted(number + 1, strategy, int(accumulate), precision)
    return found


def out_of_step(strategy: str, place: str) -> dict[str, Any]:
    """A failure where the others have updated their weights and the culprit has not, or not all."""
    place = place.replace("-", " ")
    one = Trainee(strategy)
    one.step(0)
    one.breaks(1, place)
    told = recover()
    one.step(1)
    one.step(2)
    return {"told": told, "losses": [one.losses[number] for number in (1, 2)]}


def fails_everywhere(strategy: str, place: str) -> dict[str, Any]:
    """All ranks fail alike, so that the group is sound; what is half made must not count when it is made again."""
    one = Trainee(strategy, 2)
    one.step(0)
    settled = ddl.unsettled()
    try:
        one.step(1, place, everywhere=True)
    except BrokenError:
        unsettled = ddl.unsettled()
    ddl.recover()
    found = {"before": settled, "unsettled": unsettled, "after": ddl.unsettled()}
    one.step(1)
    one.step(2)
    return found | {"losses": one.all_losses(), "expected": uninterrupted(3, strategy, 2)}


def many_models() -> dict[str, Any]:
    """Ten failures in a row, in turn in each of several models; all of them go on after each."""
    trainees = {strategy: Trainee(strategy) for strategy in ALL}
    found: dict[str, Any] = {"counts": [], "told": [], "equal": []}
    for turn in range(10):
        for one in trainees.values():
            one.step(turn)
        before = [ddl.full_state_dict(one.model) for one in trainees.values()]
        name = ALL[turn % len(ALL)]
        trainees[name].breaks(turn + 1, ("forward", "backward")[turn // len(ALL) % 2])
        found["told"].append(recover())
        after = [ddl.full_state_dict(one.model) for one in trainees.values()]
        found["equal"].append(all(torch.equal(a[key], b[key]) for a, b in zip(before, after, strict=True) for key in a))
        for one in trainees.values():
            one.forget_from(turn + 1)
        found["counts"].append(census(*found["counts"][:1]))
    found["losses"] = {name: one.all_losses() for name, one in trainees.items()}
    return found


def cannot_be_taken_over() -> dict[str, Any]:
    """On the culprit alone one of three models fails to take up the new group, while the others wait for it."""
    first, second, third = (Trainee(strategy) for strategy in ("ddp", "zero:2", "zero:3"))
    for one in (first, second, third):
        one.step(0)
    if ddl.rank == culprit:
        prepared = ddl.prepared_models()[1].prepared

        def fails() -> None:
            raise OSError("no space")

        prepared._start = fails
    first.breaks(1, "forward")
    told = recover()
    first.step(1)
    third.step(1)
    return {
        "told": told,
        "call": said(lambda: second.model(**batch(1))),
        "backward": said(lambda: ddl.backward(first.model(**batch(2)).loss, model=second.model)),
        "step": said(lambda: ddl.step(model=second.model)),
        "state_dict": said(second.model.state_dict),
        "module": type(ddl.unwrap(second.model)).__name__,
        "losses": [one.losses[1] for one in (first, third)],
    }


def only_some_have_it() -> dict[str, Any]:
    """The culprit has dropped a model that the others keep, as when it failed before the line that does."""
    first, extra = Trainee("ddp"), Trainee("zero:2")
    model = extra.model if ddl.rank != culprit else None
    del extra
    told = recover()
    first.step(0)
    later = Trainee("zero:2")
    later.step(0)
    again = recover()
    later.step(1)
    return {
        "told": told,
        "again": again,
        "said": said(lambda: model(**batch(0))) if model else "",
        "loss": later.losses,
    }


def a_program_makes_the_group_anew() -> dict[str, Any]:
    """As user code does that destroys and initialises by itself; the model of the cell before goes on."""
    one = Trainee("ddp")
    one.step(0)
    begin("ddp")
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    begin("ddp")
    one.step(1)
    return {"losses": one.all_losses(), "expected": uninterrupted(2, "ddp")}


def shards_before_prepare() -> dict[str, Any]:
    """A model of `model_init` that is not prepared yet when a rank fails."""
    begin("zero:3")
    with ddl.model_init():
        model = MLP()
    before = ddl.full_state_dict(model)
    recover()
    begin("zero:3")
    after = ddl.full_state_dict(model)
    model, optimizer = ddl.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loss = model(**batch(0)).loss
    ddl.backward(loss, model=model)
    ddl.step(model=model)
    return {"equal": all(torch.equal(before[key], after[key]) for key in before), "loss": float(loss.detach())}


def evaluation() -> dict[str, Any]:
    """Models without an optimizer."""
    found = {}
    for strategy in ALL:
        begin(strategy)
        with ddl.model_init():
            model = MLP()
        model = ddl.prepare(model)
        with torch.no_grad():
            before = float(model(**batch(0)).loss)
            told = recover()
            found[strategy] = {"before": before, "after": float(model(**batch(0)).loss), "told": told}
        del model
    return found


def warm_up() -> None:
    """Let libraries load all their parts, and the garbage collector, which recovery calls, pass over them after."""
    for strategy in ALL if ddl.world_size == 2 else ("axonn:2x2x1",):
        Trainee(strategy).step(0)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # where it hangs, if it does
    notes = Notes(sys.argv[1], ddl.rank)
    warm_up()
    for check in sys.argv[2:]:
        name, *arguments = check.split(" ")
        began = time.monotonic()
        notes.write(check, globals()[name](*arguments))
        notes.write(f"seconds of {check}", round(time.monotonic() - began, 1))
    ddl.close()
