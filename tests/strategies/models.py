"""Small models for ranks, each with its data: the ones that the parity promise names, and one for measuring memory."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 64
SEQUENCE = 16


class MLP(torch.nn.Module):
    """Linear layers with biases; the loss is computed in the forward, as Hugging Face models do."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        layers = [torch.nn.Linear(width, width) for _ in range(depth)]
        self.body = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.Tanh())])
        self.head = torch.nn.Linear(width, 4)
        self.register_buffer("scale", torch.rand(1) + 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = torch.nn.functional.cross_entropy(self.head(self.body(x * self.scale)), labels)
        return Output(loss=loss)


class Layers(torch.nn.Module):
    """Equal layers and nothing else: halves and quarters of it are whole layers."""

    def __init__(self, width: int = 32, depth: int = 8) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return Output(loss=torch.nn.functional.cross_entropy(self.body(x), labels))


class Output(dict[str, torch.Tensor]):
    """As Hugging Face models return: a dict whose entries are attributes too."""

    @property
    def loss(self) -> torch.Tensor:
        return self["loss"]


def llama(*, tied: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2 * SEQUENCE,
            tie_word_embeddings=tied,
        )
    )


def opt() -> torch.nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            max_position_embeddings=2 * SEQUENCE,
            dropout=0.0,
            attention_dropout=0.0,
        )
    )


MODELS = {
    "mlp": MLP,
    "llama-untied": lambda: llama(tied=False),
    "llama-tied": lambda: llama(tied=True),
    "opt": opt,
}


def samples(model: str, count: int) -> list[dict[str, torch.Tensor]]:
    """The same `count` samples on every rank, as a map-style data set of dicts."""
    generator = torch.Generator().manual_seed(7)
    if model == "mlp":
        inputs = torch.randn(count, 32, generator=generator)
        labels = torch.randint(0, 4, (count,), generator=generator)
        return [{"x": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]
    tokens = torch.randint(0, VOCABULARY, (count, SEQUENCE), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]
