"""Run on each rank: saves under some strategies, and loads what others saved.

Started as `matrix_ranks.py FOLDER CHECKPOINTS TASK...`; tasks are those of `Cells.do`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.checkpoint.training import Cells
from tests.strategies.ranks import Notes

cells = Cells()
notes = Notes(sys.argv[1], cells.ddl.world.rank)
for task in sys.argv[3:]:
    notes.write(task, cells.do(task, Path(sys.argv[2])))
cells.ddl.close()
