"""Run on each rank: saves under some strategies, and loads what others saved.

Started as `matrix_ranks.py FOLDER CHECKPOINTS TASK...`. The task `STRATEGY MODEL` makes the checkpoint of the name
`RANKS STRATEGY MODEL`; the task `STRATEGY<NAME` loads one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.checkpoint.training import Cells
from tests.strategies.ranks import Notes

cells = Cells()
notes = Notes(sys.argv[1], cells.ddl.world.rank)
checkpoints = Path(sys.argv[2])
for task in sys.argv[3:]:
    strategy, loads, name = task.partition("<")
    if loads:
        notes.write(task, cells.resumed(strategy, name.split()[-1], checkpoints / name))
    else:
        strategy, model = task.split()
        name = f"{cells.ddl.world.world_size} {task}"
        notes.write(task, cells.halfway(strategy, model, checkpoints / name))
cells.ddl.close()
