"""On a rank: the training cell of design.md section 3 under any strategy, beside the same cell in one process.

A script of this folder makes one `Parity` and asks it for comparisons; the tests judge the differences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from ddl_magics.protocol import CellRequest
from ddl_magics.rank.program import init
from ddl_magics.rank.world import world_of_one
from tests.strategies.models import MODELS, samples

BATCH = 8
STEPS = 10
ACCUMULATE = {"adamw": 2, "sgd": 1}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


class Parity:
    """Runs cells on this rank, and keeps what one process got."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.ddl = init("ddp", device="cpu")
        self.cells = 0
        self.one_process: dict[tuple[str, str], dict[str, Any]] = {}

    def begin(self, strategy: str, precision: str) -> None:
        """Begin a cell as the notebook would."""
        self.cells += 1
        run = f"run{self.cells}"
        request = CellRequest(
            code="", cell=self.cells, run=run, name=run, strategy=strategy, precision=precision, seed=1
        )
        self.ddl.recorder.start_run(run)
        self.ddl.begin_cell(request)

    def train(
        self, strategy: str, name: str, kind: str, precision: str = "32", same_batch: bool = False
    ) -> dict[str, Any]:
        """Train as the cell does: every loss (mean over ranks), every norm, whole weights at the end."""
        self.begin(strategy, precision)
        ddl, accumulate = self.ddl, ACCUMULATE[kind]
        data = samples(name, BATCH) * (STEPS * accumulate) if same_batch else samples(name, BATCH * STEPS * accumulate)
        losses, norms = [], []
        with ddl.model_init():
            model = MODELS[name]()
        optimizer = OPTIMIZERS[kind](model.parameters())
        loader = DataLoader(data, batch_size=BATCH, shuffle=not same_batch)
        model, optimizer, loader = ddl.prepare(model, optimizer, loader, accumulate=accumulate)
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

    def compare(self, strategy: str, name: str, kind: str) -> dict[str, float]:
        """Largest relative difference of a loss and of a norm; of a weight in units of the largest weight."""
        if (name, kind) not in self.one_process:
            with world_of_one():
                self.one_process[name, kind] = self.train("single", name, kind)
        got, expected = self.train(strategy, name, kind), self.one_process[name, kind]
        assert list(got["weights"]) == list(expected["weights"])
        largest = max(float(weight.abs().max()) for weight in expected["weights"].values())
        difference = max(
            float((got["weights"][key] - weight).abs().max()) for key, weight in expected["weights"].items()
        )
        return {
            "losses": _furthest(got["losses"], expected["losses"]),
            "norms": _furthest(got["norms"], expected["norms"]),
            "weights": difference / largest,
            "moved": abs(expected["losses"][-1] - expected["losses"][0]),
        }


def _furthest(got: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))
