"""Tiny random models of the families that `ddl.from_pretrained` is for, saved as plain transformers saves them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.strategies.models import SEQUENCE, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * SEQUENCE,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(name: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, name)(**{**SIZES, **more})

    return make


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "llama-tied": _config("LlamaConfig", tie_word_embeddings=True),
    "mistral": _config("MistralConfig"),
    "qwen2": _config("Qwen2Config", tie_word_embeddings=True),
    "qwen3": _config("Qwen3Config", head_dim=8),
    "phi": _config("PhiConfig", num_key_value_heads=4, resid_pdrop=0.0),
    "opt": _config("OPTConfig", ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0),
}
SHARDED = {"mistral", "opt"}
"""Saved in several files."""


def ids() -> torch.Tensor:
    """A batch of 2 rows."""
    return torch.randint(3, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))


def save_all(folder: Path) -> None:
    """Save a folder for each family beside what plain transformers makes of it, and some that cannot be loaded."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, T5Config

    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config())
        model.generation_config.max_new_tokens = 7
        model.save_pretrained(folder / name, **({"max_shard_size": "20KB"} if name in SHARDED else {}))
        plain = AutoModelForCausalLM.from_pretrained(folder / name)
        weights = {key: value.clone() for key, value in plain.state_dict().items()}
        logits = plain(input_ids=ids()).logits.detach()
        plain(input_ids=ids(), labels=ids()).loss.backward()
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
        torch.save({"logits": logits, "weights": weights, "after": plain.state_dict()}, folder / f"{name}.pt")

    llama = AutoModelForCausalLM.from_pretrained(folder / "llama")
    llama.config.save_pretrained(folder / "pickled")
    torch.save(llama.state_dict(), folder / "pickled" / "pytorch_model.bin")
    llama.config.save_pretrained(folder / "incomplete")
    state = load_file(folder / "llama" / "model.safetensors")
    del state["model.norm.weight"]
    state["model.another.weight"] = torch.ones(2)
    save_file(state, folder / "incomplete" / "model.safetensors", metadata={"format": "pt"})
    T5Config().save_pretrained(folder / "t5")


if __name__ == "__main__":
    import sys
    from pathlib import Path

    save_all(Path(sys.argv[1]))
