"""Pretrained language models, each rank reading of the files what its strategy has it hold: `ddl.from_pretrained`.

The model is built without memory (parameters on the meta device, buffers for real, since constructors compute some of
them), and the strategy fills it tensor by tensor from the safetensors files: rows under fsdp, blocks under axonn, one
parameter at a time under zero:3. Limits: causal language models of transformers; what has no safetensors files, or
files whose weights must be converted or dequantised, is loaded whole on every rank by transformers itself; code that
comes with a model is not run.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddl_magics.errors import UsageOnRankError, nearest
from ddl_magics.rank import host
from ddl_magics.rank.batches import own_randomness
from ddl_magics.rank.checkpoint import fit
from ddl_magics.rank.checkpoint.tensors import read_folder
from ddl_magics.strategies.base import Entry
from ddl_magics.strategies.kept import WEIGHT, first_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ddl_magics.rank.checkpoint.talk import Talk
    from ddl_magics.strategies.base import Strategy, Whole


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for."""

    name: str
    """A folder, or a name of the hub."""
    revision: str | None
    dtype: torch.dtype | str | None
    default: torch.dtype
    """The dtype where `dtype` is None, or says `auto` and the files say nothing."""
    changes: dict[str, Any]
    """Settings of the configuration."""


@dataclass(frozen=True)
class Source:
    """What to load."""

    folder: Path
    config: Any
    """Of transformers, with the caller's changes and the dtype that is wanted."""


def load(
    wanted: Wanted,
    strategy: Strategy,
    talk: Talk,
    first: Callable[[], AbstractContextManager[None]],
    note: Callable[[str], object],
) -> nn.Module:
    """Build the model and fill it, in evaluation mode as transformers gives it; a collective.

    `first` lets one rank of each node through before the others, see `Among.first`.

    Raises
    ------
    UsageOnRankError
        There is no such model.
    CheckpointError
        The files are of another model; the first names that differ are shown.
    """
    folder = _folder(wanted, talk, first)
    made: list[tuple[Source, nn.Module]] = []

    def build() -> None:
        source = _source(folder, wanted)
        made.append((source, _without_memory(source.config)))

    talk.do(build)
    source, module = made[0]
    why_whole = _why_whole(source, module)
    if why_whole:
        note(f"{wanted.name} is loaded whole on every rank: {why_whole}.")
        return _whole(source, talk)
    weights: dict[str, Whole] = {}
    talk.do(lambda: weights.update(_weights(module, source.folder)))

    def read(name: str) -> Whole:
        host.trim()  # tensors come and go between shards that stay, and the heap would keep the gaps
        return weights[name]

    strategy.materialise(module, read)
    _finish(module, source)
    host.trim()
    return module


def _folder(wanted: Wanted, talk: Talk, first: Callable[[], AbstractContextManager[None]]) -> Path:
    found = talk.do(lambda: _local_folder(wanted.name))
    lacking = [rank for rank, folder in enumerate(found) if folder is None]
    if not lacking:
        return found[talk.rank]  # type: ignore[no-any-return]
    if len(lacking) < len(found):
        raise UsageOnRankError(
            f"The folder {wanted.name} is not there on ranks {lacking}", "Put it on a file system that all nodes share."
        )
    fetched: list[Path | UsageOnRankError] = []
    with first():
        try:
            fetched.append(_fetch(wanted.name, wanted.revision))
        except UsageOnRankError as error:
            fetched.append(error)
    talk.do(lambda: _require(fetched[0]))
    return _require(fetched[0])


def _require(fetched: Path | UsageOnRankError) -> Path:
    if isinstance(fetched, UsageOnRankError):
        raise fetched
    return fetched


# What to load


def _source(folder: Path, wanted: Wanted) -> Source:
    """Read the configuration of a folder.

    Raises
    ------
    UsageOnRankError
        There is none, it is of no causal language model, or it has no such setting.
    """
    transformers = _transformers()
    try:
        config, unknown = transformers.AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **wanted.changes)
    except (ValueError, OSError, KeyError) as error:
        raise UsageOnRankError(
            f"{folder} holds no model that transformers knows: {_sentence(error)}",
            "Give a folder with a config.json, as save_pretrained writes it.",
        ) from error
    if unknown:
        name = next(iter(unknown))
        raise UsageOnRankError(
            f"The {type(config).__name__} of {folder.name} has no setting {name!r}", nearest(name, sorted(vars(config)))
        )
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageOnRankError(
            f"{folder} is a {config.model_type}, which is no causal language model",
            "Build it in ddl.model_init() and load weights by ddl.load_full_state_dict.",
        )
    dtype = _dtype(wanted.dtype, config, wanted.default)
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)  # before transformers 4.56
    return Source(folder, config)


def _dtype(dtype: torch.dtype | str | None, config: Any, default: torch.dtype) -> torch.dtype:
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or default
    if dtype is None:
        return default
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageOnRankError(f"dtype={dtype!r} cannot be", "Valid: torch.float32, torch.bfloat16, ..., or 'auto'.")
    return found


def _local_folder(name: str) -> Path | None:
    """The folder of that name; None where it can only be a name of the hub.

    Raises
    ------
    UsageOnRankError
        It looks like a path, and there is no such folder.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageOnRankError(f"There is no folder {name}", "Give a folder, or a name of the hub such as org/model.")
    return None


FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def _fetch(name: str, revision: str | None) -> Path:
    """Folder with a model of the hub, downloaded where it is not there yet.

    Raises
    ------
    UsageOnRankError
        It cannot be had.
    """
    _transformers()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
        if not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*FILES, "*.bin"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UsageOnRankError(
            f"{name} is no folder here and cannot be had from the hub: {_sentence(error)}",
            "Give a folder; or a name as on huggingface.co, where this machine reaches it (HF_HUB_OFFLINE unset).",
        ) from error
    return folder


# The model


def _without_memory(config: Any) -> nn.Module:
    """Build it with parameters on the meta device; buffers are real, as the constructors compute them."""
    transformers = _transformers()
    with own_randomness(), _parameters_on_meta():
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return module


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within it every parameter loses its memory as soon as a module has it, so that initialising it costs nothing."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            empty = torch.empty_like(parameter, device="meta")
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _weights(module: nn.Module, folder: Path) -> dict[str, Whole]:
    """First name of every weight -> its tensor in the files; raises where they do not fit."""
    own = [Entry(name, WEIGHT, tuple(tensor.shape), tensor.dtype) for name, tensor in first_names(module).items()]
    found = _under_our_names(module, read_folder(folder))
    return {entry.name: whole for entry, whole in fit.match(module, own, found, type(module).__name__, folder)}


def _under_our_names(module: Any, found: dict[str, Whole]) -> dict[str, Whole]:
    """Names of a file that was saved from the model without its head lack the first part, as transformers knows."""
    prefix = f"{module.base_model_prefix}."
    if any(name.startswith(prefix) for name in found):
        return found
    own = module.state_dict()
    return {prefix + name if prefix + name in own else name: whole for name, whole in found.items()}


def _finish(module: Any, source: Source) -> None:
    module.eval()
    if (source.folder / "generation_config.json").is_file():
        module.generation_config = _transformers().GenerationConfig.from_pretrained(source.folder)


# What cannot be read in parts


def _why_whole(source: Source, module: nn.Module) -> str:
    if getattr(source.config, "quantization_config", None) is not None:
        return "its weights are quantised"
    if not any(source.folder.glob("*.safetensors")):
        return "it has no safetensors files"
    if _is_converted(module):
        return "transformers converts its weights when it reads them"
    return ""


def _is_converted(module: nn.Module) -> bool:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before transformers 5 a class said so itself
        return bool(getattr(module, "_checkpoint_conversion_mapping", None))
    return bool(get_model_conversion_mapping(module, add_legacy=False))


def _whole(source: Source, talk: Talk) -> nn.Module:
    made: list[nn.Module] = []

    def read() -> None:
        load = _transformers().AutoModelForCausalLM.from_pretrained
        try:
            made.append(load(source.folder, config=source.config, dtype="auto"))
        except (OSError, ValueError, json.JSONDecodeError) as error:
            raise UsageOnRankError(
                f"transformers cannot load {source.folder}: {_sentence(error)}",
                "Save the model again by save_pretrained, which writes safetensors.",
            ) from error

    talk.do(read)
    return made[0]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageOnRankError(
            "from_pretrained needs the package transformers", "Run: pip install 'ddl-magics[hf]'."
        ) from error
    return transformers


def _sentence(error: BaseException) -> str:
    """The first of what an error says, without its full stop."""
    text = str(error).strip()
    return text.splitlines()[0].split(". ")[0].rstrip(".") if text else type(error).__name__
