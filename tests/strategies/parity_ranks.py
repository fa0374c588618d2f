"""Run on each rank: the training cell under each strategy beside one process.

Started as `parity_ranks.py FOLDER MODEL,MODEL... SPEC...`; the tests judge the differences.
"""

from __future__ import annotations

import sys

from tests.strategies.parity import OPTIMIZERS, Parity
from tests.strategies.ranks import Notes

parity = Parity()
notes = Notes(sys.argv[1], parity.ddl.rank)
for spec in sys.argv[3:]:
    for model in sys.argv[2].split(","):
        for optimizer in OPTIMIZERS:
            notes.write(f"{spec} {model} {optimizer}", parity.compare(spec, model, optimizer))
    trained = parity.train(spec, "llama-untied", "sgd", "bf16-mixed", same_batch=True)
    notes.write(f"{spec} bf16-mixed", trained["losses"])
parity.ddl.close()
