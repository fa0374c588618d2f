"""A script for torchrun: `generate_script.py FOLDER TIMES STRATEGY GATHER SIZES TOKENS`; a line for each batch size.

Rank 0 measures transformers' generate as a user would call it, with a thread a core, while the others wait; then all
ranks measure ours, with a thread each (in one process with all of them). The two in turn, TIMES times after one that
does not count; what is printed are medians, ours first: tokens a second, and seconds to the first token.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import ddl_magics

PROMPTS = [
    "The capital of France is", "Once upon a time there was", "Gravity is the force that", "In the morning she went to",
    "The quick brown fox jumps", "A function in Python is", "My favourite food is", "The largest planet is",
]  # fmt: skip

logging.disable_progress_bar()
folder, times, strategy, gathered, sizes, count = sys.argv[1:]
gather, new_tokens = {"": None, "once": True, "every": False}[gathered], int(count)
ddl = ddl_magics.init(strategy, device="cpu")
cores = len(os.sched_getaffinity(0))
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
plain = AutoModelForCausalLM.from_pretrained(folder).eval() if ddl.rank == 0 else None
with ddl.model_init():
    model = AutoModelForCausalLM.from_pretrained(folder)
model = ddl.prepare(model)


class FirstToken:
    """What transformers calls a streamer: notes when the first token came."""

    def __init__(self) -> None:
        self.times = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts, then the tokens of each step."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""


def theirs(prompts: list[str]) -> tuple[float, float]:
    """One process, from texts to texts."""
    torch.set_num_threads(cores)
    began, seen = time.perf_counter(), FirstToken()
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    made = plain.generate(
        **inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, streamer=seen
    )
    texts = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :])
    seconds = time.perf_counter() - began
    return len(texts) * new_tokens / seconds, seen.times[1] - began


def ours(prompts: list[str]) -> tuple[float, float]:
    """All ranks, as `ddl.generate` tells itself."""
    torch.set_num_threads(cores if ddl.world_size == 1 else 1)
    made = ddl.generate(
        model, prompts, tokenizer=tokenizer, max_new_tokens=new_tokens, min_new_tokens=new_tokens, gather=gather
    )
    return made.figures.tokens_per_second, made.figures.first_token


for size in map(int, sizes.split(",")):
    taken: tuple[list, list] = ([], [])
    for turn in range(int(times) + 1):
        found = [theirs(PROMPTS[:size])] if ddl.rank == 0 else []
        if ddl.world_size > 1:
            ddl.barrier()
        found.append(ours(PROMPTS[:size]))
        if turn and ddl.rank == 0:
            for side, value in zip(taken, reversed(found), strict=True):
                side.append(value)
    if ddl.rank == 0:
        medians = [[statistics.median(values) for values in zip(*side, strict=True)] for side in taken]
        print("measured " + json.dumps({"batch": size, "ours_and_theirs": medians}), flush=True)
ddl.close()
