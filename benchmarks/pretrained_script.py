"""On a rank: load a folder in one way and prepare it, and print what memory that took, of the rank that took most.

Started as `pretrained_script.py FOLDER WAY` with WAY a strategy, or `plain`. Counted are the bytes that are this
process's own (RssAnon of /proc/self/status), above what it had before: pages of a mapped file belong to the system,
which can drop them, and all ranks of a node share them.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch

import ddl_magics

EVERY = 0.002
"""Seconds between two looks."""


def own_bytes() -> int:
    """Memory that no other process and no file backs."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class Peak:
    """The highest of `own_bytes` while it runs."""

    def __init__(self) -> None:
        self.before = own_bytes()
        self.highest = self.before
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(EVERY):
            self.highest = max(self.highest, own_bytes())

    def end(self) -> int:
        """Bytes at the peak, above those before."""
        self._stop.set()
        self._thread.join()
        return max(self.highest, own_bytes()) - self.before


def main() -> None:
    """Measure one way."""
    torch.set_num_threads(1)
    folder, way = sys.argv[1:]
    plain = way == "plain"
    with ddl_magics.init("ddp" if plain else way, device="cpu") as ddl:
        import transformers

        transformers.logging.disable_progress_bar()
        ddl.prepare(torch.nn.Linear(2, 2))  # what the strategy's library loads at first
        peak, began = Peak(), time.monotonic()
        if plain:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
            with torch.no_grad():  # its weights are views of the file until something is written, as training does
                for parameter in model.parameters():
                    parameter.mul_(1)
        else:
            model = ddl.from_pretrained(folder)
        seconds = time.monotonic() - began
        loaded = own_bytes() - peak.before
        found = {"seconds": seconds, "loaded": loaded, "peak": peak.end()}
        ddl.print(json.dumps({key: max(ddl.all_gather(value)) for key, value in found.items()}))
        del model


if __name__ == "__main__":
    main()
