"""`ddl.from_pretrained` of a model of 0.8 GB under each strategy, against plain `from_pretrained` on every rank."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.measure import Row, main, torchrun

SCRIPT = Path(__file__).with_name("pretrained_script.py")
RANKS = 2
AIMS = {"single": 1.05, "ddp": 1.05, "zero:3": 0.7, "fsdp": 0.55, "axonn:2x1x1": 0.7}
"""Of the peak: a share of 1/2, and what the strategy needs beside it. The largest parameter is 16 % of the model:
zero:3 has one of them whole at a time, and axonn leaves the embeddings whole."""


def make_model(folder: Path) -> None:
    """Save random weights, 205 million parameters in fp32, in several files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=16,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")


def measure(quick: bool) -> list[Row]:
    """Memory of the rank that takes most, at its peak, and seconds until the weights are there."""
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in ("plain", *AIMS)}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for _ in range(1 if quick else 3):
            for way, found in taken.items():
                printed = torchrun(SCRIPT, RANKS, folder, way).splitlines()
                found.append(json.loads(next(line for line in printed if line.startswith("{"))))
    middle = {
        way: {key: statistics.median(one[key] for one in found) for key in found[0]} for way, found in taken.items()
    }
    rows = []
    for way, aim in AIMS.items():
        ours, theirs = middle[way], middle["plain"]
        mib = 2**20
        rows.append(Row(f"load, peak, {way}", "plain", ours["peak"] / mib, theirs["peak"] / mib, "MiB", aim))
    rows += [
        Row(f"load, {way}", "plain", middle[way]["seconds"], middle["plain"]["seconds"], "s")
        for way in AIMS
    ]  # fmt: skip
    return rows


if __name__ == "__main__":
    main(measure, __doc__ or "")
