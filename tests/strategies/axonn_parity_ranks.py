"""Run on each rank: the training cell under `axonn`, beside one process, and as AxoNN alone would do it.

Started as `axonn_parity_ranks.py FOLDER GRID...`; the tests judge the differences.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from axonn.intra_layer import Linear

from ddl_magics.strategies.axonn.linear import ParallelLinear
from tests.strategies.models import MODELS
from tests.strategies.parity import OPTIMIZERS, Parity
from tests.strategies.ranks import Notes

if TYPE_CHECKING:
    import torch

warnings.simplefilter("error")
parity = Parity()
notes = Notes(sys.argv[1], parity.ddl.rank)


def compare_uncorrected(strategy: str) -> dict[str, float]:
    """Compare when split layers run AxoNN's own forward, its bias gradient included."""

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        layer.skip_bias_add = False
        return Linear.forward(layer, x)

    corrected = ParallelLinear.forward
    ParallelLinear.forward = forward
    try:
        return parity.compare(strategy, "mlp", "sgd")
    finally:
        ParallelLinear.forward = corrected


for grid in sys.argv[2:]:
    for model in MODELS:
        for optimizer in OPTIMIZERS:
            notes.write(f"parity {grid} {model} {optimizer}", parity.compare(f"axonn:{grid}", model, optimizer))
    notes.write(f"uncorrected {grid}", compare_uncorrected(f"axonn:{grid}"))
    notes.write(f"overlap {grid}", parity.compare(f"axonn:{grid},overlap=1", "mlp", "sgd"))
    for precision in ("bf16-mixed", "bf16-true"):
        model = "llama-untied" if parity.ddl.world_size == 2 else "mlp"  # small where ranks share cores
        trained = parity.train(f"axonn:{grid}", model, "sgd", precision, same_batch=True)
        notes.write(f"{precision} {grid}", trained["losses"])
parity.ddl.close()
