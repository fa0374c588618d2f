"""The DeepSpeed configuration of one prepared model: the user's own `config=FILE`, what follows from the cell, sizes.

No torch and no DeepSpeed, so that the notebook can check a file before any rank reads it. Whatever the cell says
already (stage, precision, accumulation, batch, optimizer) may stand in the file only if it says the same; a value
`"auto"`, Hugging Face's word for "from the training code", counts as absent.
Reference of the keys: https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import SpecError

if TYPE_CHECKING:
    from ddl_magics.strategies.base import Training
    from ddl_magics.strategies.spec import StrategySpec

Config = dict[str, Any]

OWNED = {
    "optimizer": "Make it in the cell and give it to ddl.prepare",
    "scheduler": "Make it in the cell over the optimizer",
    "fp16": "Choose the precision with --precision",
    "amp": "Choose the precision with --precision",
    "torch_autocast": "Choose the precision with --precision",
    "train_batch_size": "The loader's batch size is the global batch",
    "train_micro_batch_size_per_gpu": "The loader's batch size is the global batch",
}
"""Sections that the cell owns altogether, and where the user says it instead."""

BUCKET = 500_000_000
"""DeepSpeed's default size of its reduction buckets, in elements. It allocates them whole, whatever the model."""


def read(path: str) -> Config:
    """Read a DeepSpeed configuration file and drop its `auto` values.

    Raises
    ------
    SpecError
        No such file, no JSON, or not an object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        config = json.loads(text)
    except OSError as error:
        message = f"The DeepSpeed configuration {path} cannot be read: {error.strerror}"
        raise SpecError(message, f"Relative paths count from {Path.cwd()}.") from error
    except json.JSONDecodeError as error:
        message = f"The DeepSpeed configuration {path} is no JSON: line {error.lineno}: {error.msg}"
        raise SpecError(message, "Mend the file.") from error
    if not isinstance(config, dict):
        message = f"The DeepSpeed configuration {path} is a {type(config).__name__}, not an object"
        raise SpecError(message, 'Write {"zero_optimization": {...}}.')
    return _without_auto(config)


def _without_auto(config: Config) -> Config:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto"
    }


def check(config: Config, path: str, stage: int) -> None:
    """Raise SpecError where a file says what the cell says already."""
    for key, remedy in OWNED.items():
        section = config.get(key)
        if section is not None and not (isinstance(section, dict) and section.get("enabled") is False):
            message = f"{path} sets {key!r}, which the cell decides"
            raise SpecError(message, f"{remedy}, and remove it from the file.")
    given = config.get("zero_optimization", {}).get("stage", stage)
    if given != stage:
        message = f"{path} sets ZeRO stage {given}, and the strategy is zero:{stage}"
        raise SpecError(message, f"Write zero:{given},config={path}, or remove the stage from the file.")


def build(spec: StrategySpec, training: Training, *, numel: int, world_size: int, cuda: bool) -> Config:
    """The configuration for one model of `numel` parameters, as `deepspeed.initialize` takes it.

    Raises
    ------
    SpecError
        The user's file contradicts the precision or the accumulation of the cell.
    """
    stage = int(spec.argument)
    config: Config = {}
    path = spec.option("config")
    if path is not None:
        config = read(path)
        check(config, path, stage)
        _check_training(config, path, training)
    zero = _sizes(stage, numel, world_size) | _offload(spec, cuda=cuda) | config.get("zero_optimization", {})
    return config | {
        "train_micro_batch_size_per_gpu": 1,  # only its throughput timer reads it, and we silence that
        "gradient_accumulation_steps": 1,  # the context divides the loss and says which backward is a boundary
        "steps_per_print": config.get("steps_per_print", 2**31 - 1),
        "zero_allow_untested_optimizer": True,  # any optimizer that the user makes
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero | {"stage": stage, "memory_efficient_linear": False},  # see zero_library
        "bf16": config.get("bf16", {}) | {"enabled": training.precision == "bf16-true"},
        # As `common.autocast`, which the engine would switch off. No "safe" modules: gradients travel in the dtype of
        # their weights, as under DDP.
        "torch_autocast": {
            "enabled": training.precision != "32",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
    }


def _check_training(config: Config, path: str, training: Training) -> None:
    given = config.get("gradient_accumulation_steps", training.accumulate)
    if given != training.accumulate:
        message = f"{path} accumulates {given} steps, and ddl.prepare {training.accumulate}"
        raise SpecError(message, f"Write ddl.prepare(..., accumulate={given}), or remove it from the file.")
    bf16 = config.get("bf16", {}).get("enabled")
    if bf16 is not None and bf16 != (training.precision == "bf16-true"):
        message = f"{path} sets bf16 to {str(bf16).lower()}, and the precision of the cell is {training.precision}"
        raise SpecError(message, "Choose the precision with --precision, and remove it from the file.")


def _sizes(stage: int, numel: int, world_size: int) -> Config:
    """Buffers in proportion to the model: DeepSpeed's defaults are for billions of parameters.

    A gradient is kept whole until the bucket that it waits in is full: here an eighth of the model at most.
    Stage 3 keeps parameters below a threshold whole on every rank: here at most 2 % of a rank's shard, so that a
    shard is what the theory says; and it lets a gathered layer live on for reuse: here at most one shard's worth,
    else a model under a billion parameters would be whole on every rank from its forward to its backward.
    """
    sizes: Config = {"reduce_bucket_size": max(1, min(BUCKET, numel // 8))}
    if stage == 3:
        shard = max(1, numel // world_size)
        sizes |= {
            "stage3_prefetch_bucket_size": min(50_000_000, shard),
            "stage3_max_live_parameters": min(1_000_000_000, shard),
            "stage3_max_reuse_distance": min(1_000_000_000, shard),
            "stage3_model_persistence_threshold": shard // 50,
        }
    return sizes


def _offload(spec: StrategySpec, *, cuda: bool) -> Config:
    sections = {"offload": "offload_optimizer", "offload_param": "offload_param"}
    return {
        section: {"device": "cpu", "pin_memory": cuda}
        for option, section in sections.items()
        if spec.option(option) is not None
    }
