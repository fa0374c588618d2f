"""Histories of runs that never were, for tests and pictures of the views."""

from __future__ import annotations

import math
import random

from ddl_magics.protocol import Outcome, Point, Progress, Sample
from ddl_magics.telemetry.history import History, RankInfo, RunInfo

GIB = 2**30


def history(
    ranks=4,
    steps=320,
    total=500,
    *,
    run_id="r1",
    strategy="zero:3",
    name="fine-tune 2",
    host="n{node}",
    per_node=2,
    device="cuda",
    capacity=40 * GIB,
    share=(3.2, 3.3, 9.9, 9.0, 3.9),
    nan_at=(),
    states=None,
    waiting=None,
    notes=("global batch 32 = 4 × 8",),
    metrics=("loss", "lr", "grad_norm"),
    finish=None,
    seconds=0.66,
):
    """A run of `ranks` ranks at step `steps` of `total`; `share` is GiB by kind of a usual rank.

    `states` are (state, line, source) by rank, `waiting` the collectives; both are those of every record.
    """
    chance = random.Random(7)
    nodes = -(-ranks // per_node)
    infos = [
        RankInfo(
            r, host.format(node=r // per_node + 1), 1000 + r, f"{device}:{r % per_node}" if device == "cuda" else device
        )
        for r in range(ranks)
    ]
    run = History(RunInfo(run_id, name, strategy, ranks, nodes, 3, started=1000.0, precision="bf16-mixed"), infos)
    kinds = ("parameters", "gradients", "optimizer", "other", "reserved")
    seq = [0] * ranks
    for start in range(0, steps, 20):
        for r in range(ranks):
            points = []
            for s in range(start, min(start + 20, steps)):
                value = 1.75 + 2.2 * math.exp(-s / 70) + chance.gauss(0, 0.05)
                values = {"loss": math.nan if s in nan_at else value, "lr": 3e-4 * (1 - s / 1000), "grad_norm": 0.8}
                values["grad_norm"] += chance.random() * 0.2
                points += [Point(m, s, values.get(m, s * 1.0), 1000.0 + s * seconds) for m in metrics]
            scale = 1 + (0.11 if r == 2 else 0.0) + r * 1e-4
            memory = {k: int(v * GIB * (scale if k == "other" else 1)) for k, v in zip(kinds, share, strict=True)}
            memory |= {"total": sum(memory.values()), "capacity": capacity}
            peak = {k: int(v * 1.12) for k, v in memory.items() if k != "capacity"}
            state, line, source = (states or {}).get(r, ("running", 9, "    ddl.backward(loss)"))
            progress = Progress(
                step=min(start + 20, steps),
                total=total,
                seconds_per_step=seconds * (1.07 if r == 2 else 1),
                tokens_per_second=3100.0,
            )
            sample = Sample(
                r,
                seq[r],
                1000.0 + start * seconds,
                3,
                run_id,
                state,
                line,
                source,
                waiting=(waiting or {}).get(r),
                memory=memory,
                peak=peak,
                points=tuple(points),
                progress=progress,
                notes=notes,
            )
            run.add(sample, now=1000.0 + start * seconds)
            seq[r] += 1
    if finish is not None:
        run.finish(finish, now=1000.0 + steps * seconds)
    return run


def failed(ranks=4, at=1):
    """Rank `at` raised, the others were released."""
    return [
        Outcome(r, "error", 3.0, "ValueError", "odd batch", ("Traceback", "ValueError: odd batch"), 7, 5.0)
        if r == at
        else Outcome(r, "released", 3.1)
        for r in range(ranks)
    ]
