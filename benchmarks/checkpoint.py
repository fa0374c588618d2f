"""`ddl.save` and `ddl.load` of a model of 100 MB with AdamW, against torch.save and the libraries' own."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.measure import Row, main, torchrun

SCRIPT = Path(__file__).with_name("checkpoint_script.py")
LIBRARY = {"ddp": "plain DCP", "fsdp": "plain DCP", "zero:3": "DeepSpeed's own"}
"""What each strategy's users take otherwise: torch.distributed.checkpoint, or the engine's save_checkpoint."""


def measure(quick: bool) -> list[Row]:
    """Seconds of a save until it is on the disk, and of a load by all ranks, 2 ranks."""
    rows = []
    for strategy, library in LIBRARY.items():
        printed = torchrun(SCRIPT, 2, strategy, "2" if quick else "7")
        taken = json.loads(printed.splitlines()[-1])
        for what in ("save", "load"):
            for way, name in (("torch.save", f"torch.{what}"), ("library", library)):
                rows.append(Row(f"{what}, {strategy}", name, taken[f"{what} ddl.save"], taken[f"{what} {way}"], "s"))
    return rows


if __name__ == "__main__":
    main(measure, __doc__ or "")
