"""Run on each rank: the training cell of design.md section 3 under `axonn`, beside one process.

Started as `axonn_parity_ranks.py FOLDER GRID...`; the tests judge the differences.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from axonn.intra_layer import Linear
from torch.utils.data import DataLoader

from ddl_magics.protocol import CellRequest
from ddl_magics.rank.alone import world_of_one
from ddl_magics.rank.context import init
from tests.strategies.models import MODELS, samples
from tests.strategies.ranks import Notes

BATCH = 8
STEPS = 10
ACCUMULATE = {"adamw": 2, "sgd": 1}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}

warnings.simplefilter("error")
torch.set_num_threads(1)
ddl = init("ddp", device="cpu")
notes = Notes(sys.argv[1], ddl.rank)
cells = 0


def begin(strategy: str, precision: str) -> None:
    """Begin a cell as the notebook would."""
    global cells  # noqa: PLW0603 - a cell's number
    cells += 1
    run = f"run{cells}"
    request = CellRequest(code="", cell=cells, run=run, name=run, strategy=strategy, precision=precision, seed=1)
    ddl.recorder.start_run(run)
    ddl.begin_cell(request)


def cell(strategy: str, name: str, kind: str, precision: str = "32", same_batch: bool = False) -> dict[str, Any]:
    """Train as the cell does: every loss (mean over ranks), every norm, whole weights at the end."""
    begin(strategy, precision)
    data = samples(name, BATCH) * (STEPS * ACCUMULATE[kind])
    if not same_batch:
        data = samples(name, len(data))
    losses, norms = [], []
    with ddl.model_init():
        model = MODELS[name]()
    optimizer = OPTIMIZERS[kind](model.parameters())
    loader = DataLoader(data, batch_size=BATCH, shuffle=not same_batch)
    model, optimizer, loader = ddl.prepare(model, optimizer, loader, accumulate=ACCUMULATE[kind])
    for batch in ddl.track(loader, epochs=1):
        loss = model(**batch).loss
        losses.append(float(ddl.all_reduce_mean(loss.detach().float())))
        ddl.backward(loss)
        norm = ddl.step(max_norm=1.0)
        if norm is not None:
            norms.append(float(norm))
    weights = ddl.full_state_dict(model)
    ddl.end_cell()
    assert len(norms) == STEPS
    return {"losses": losses, "norms": norms, "weights": weights}


one_process: dict[tuple[str, str], dict[str, Any]] = {}


def compare(strategy: str, name: str, kind: str) -> dict[str, float]:
    """Largest relative difference of a loss and of a norm; of a weight in units of the largest weight."""
    if (name, kind) not in one_process:
        with world_of_one():
            one_process[name, kind] = cell("single", name, kind)
    got, expected = cell(strategy, name, kind), one_process[name, kind]
    assert list(got["weights"]) == list(expected["weights"])
    largest = max(float(weight.abs().max()) for weight in expected["weights"].values())
    difference = max(float((got["weights"][key] - weight).abs().max()) for key, weight in expected["weights"].items())
    return {
        "losses": furthest(got["losses"], expected["losses"]),
        "norms": furthest(got["norms"], expected["norms"]),
        "weights": difference / largest,
        "moved": abs(expected["losses"][-1] - expected["losses"][0]),
    }


def furthest(got: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))


def compare_uncorrected(strategy: str) -> dict[str, float]:
    """Compare when split layers run AxoNN's own forward, its bias gradient included."""
    from ddl_magics.strategies.axonn.linear import ParallelLinear

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        layer.skip_bias_add = False
        return Linear.forward(layer, x)

    corrected = ParallelLinear.forward
    ParallelLinear.forward = forward
    try:
        return compare(strategy, "mlp", "sgd")
    finally:
        ParallelLinear.forward = corrected


for grid in sys.argv[2:]:
    for model_name in MODELS:
        for optimizer_name in OPTIMIZERS:
            finding = compare(f"axonn:{grid}", model_name, optimizer_name)
            notes.write(f"parity {grid} {model_name} {optimizer_name}", finding)
    notes.write(f"uncorrected {grid}", compare_uncorrected(f"axonn:{grid}"))
    notes.write(f"overlap {grid}", compare(f"axonn:{grid},overlap=1", "mlp", "sgd"))
    for wanted in ("bf16-mixed", "bf16-true"):
        model_name = "llama-untied" if ddl.world_size == 2 else "mlp"  # small where ranks share cores
        trained = cell(f"axonn:{grid}", model_name, "sgd", wanted, same_batch=True)
        notes.write(f"{wanted} {grid}", trained["losses"])
ddl.close()
