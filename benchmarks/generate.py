"""Text from SmolLM2 by `ddl.generate` on 2 ranks, against transformers' own generate in one process with all cores."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

from benchmarks.measure import ROOT, Row, main, torchrun

SCRIPT = Path(__file__).with_name("generate_script.py")
SIZES = "1,4,8"
CASES = {
    # ranks: strategy, whether sharded weights are gathered once, batch sizes, new tokens of each text
    1: [("single", "", SIZES, 16)],
    2: [
        ("ddp", "", SIZES, 16),
        ("axonn:2x1x1", "", SIZES, 16),
        ("zero:3", "once", SIZES, 16),
        ("fsdp", "once", SIZES, 16),
        ("zero:3", "every", "4", 4),
        ("fsdp", "every", "4", 4),
    ],
}


def smollm2() -> Path:
    """Folder of the model, converted once."""
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples" / "smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.convert()


def measure(quick: bool) -> list[Row]:
    """Tokens a second, and time to the first token, by strategy and batch size."""
    rows = []
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin would measure who else is on the cores
    for ranks, cases in CASES.items():
        for case in cases:
            printed = torchrun(SCRIPT, ranks, str(smollm2()), "1" if quick else "3", *map(str, case))
            for line in printed.splitlines():
                if line.startswith("measured "):
                    rows += rows_of(json.loads(line.removeprefix("measured ")), case)
    return rows


def rows_of(found: dict, case: tuple) -> list[Row]:
    """The two rows of one strategy and batch size."""
    gathered = {"": "", "once": ", gathered once", "every": ", gathered in every forward"}[case[1]]
    what = f"generate, {case[0]}{gathered}, batch {found['batch']}"
    rates, firsts = ([side[at] for side in found["ours_and_theirs"]] for at in (0, 1))
    return [
        Row(what, "one process", *rates, "tokens/s", higher_is_better=True),
        Row(f"first token, {case[0]}{gathered}, batch {found['batch']}", "one process", *firsts, "s"),
    ]


if __name__ == "__main__":
    main(measure, __doc__ or "")
