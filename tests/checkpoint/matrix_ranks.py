"""Run on each rank: saves under some strategies, or loads what others saved.

Started as `matrix_ranks.py FOLDER save CHECKPOINTS STRATEGY<MODEL...`, which makes checkpoints of the name
`RANKS STRATEGY MODEL`, or as `matrix_ranks.py FOLDER load CHECKPOINTS STRATEGY<NAME...`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.checkpoint.training import Cells
from tests.strategies.ranks import Notes

cells = Cells()
notes = Notes(sys.argv[1], cells.ddl.world.rank)
checkpoints = Path(sys.argv[3])
for task in sys.argv[4:]:
    strategy, _, name = task.partition("<")
    if sys.argv[2] == "save":
        model = name
        name = f"{cells.ddl.world.world_size} {strategy} {model}"
        notes.write(name, cells.halfway(strategy, model, checkpoints / name))
    else:
        notes.write(task, cells.resumed(strategy, name.split()[-1], checkpoints / name))
cells.ddl.close()
