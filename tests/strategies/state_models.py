"""For checks of what checkpoints keep: models with everything that can be special about a parameter, and their data."""

from __future__ import annotations

from typing import Any

import torch

from tests.strategies.models import MODELS, VOCABULARY, Layers, Output, samples

BATCH = 8


class Mixed(torch.nn.Module):
    """Tied weights, biases, a layer that no grid divides, a buffer, a frozen weight, one never used, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 32)
        self.body = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Tanh(), torch.nn.Linear(48, 32))
        self.norm = torch.nn.LayerNorm(32)
        self.narrow = torch.nn.Linear(32, 3)
        self.wide = torch.nn.Linear(3, 32, bias=False)
        self.head = torch.nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.spare = torch.nn.Parameter(torch.randn(5))
        self.loose = torch.nn.Parameter(torch.randn(32))
        """Trained by no optimizer."""
        self.norm.weight.requires_grad_(requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.training:
            self.calls += 1
        hidden = self.norm(self.body(self.embedding(input_ids)) + self.loose)
        logits = self.head(hidden + self.wide(torch.tanh(self.narrow(hidden))))
        return Output(loss=torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()))


class Adapted(torch.nn.Module):
    """A frozen layer with a low-rank correction that is trained (LoRA; Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = MODELS["mlp"]()
        self.base.requires_grad_(requires_grad=False)
        self.down = torch.nn.Linear(32, 4, bias=False)
        self.up = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.base.body(x * self.base.scale)
        logits = self.base.head(hidden) + self.up(self.down(hidden))
        return Output(loss=torch.nn.functional.cross_entropy(logits, labels))


def build(name: str) -> torch.nn.Module:
    own = {"mixed": Mixed, "adapted": Adapted, "layers": Layers}
    return own[name]() if name in own else MODELS[name]()


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups, as for a model whose biases are not decayed; none has what is `loose`, or frozen."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and n != "loose"]
    plain = [p for n, p in named if n.endswith("bias") or n == "spare"]
    decayed = [p for n, p in named if not (n.endswith("bias") or n == "spare")]
    return [{"params": params, "weight_decay": decay} for params, decay in ((decayed, 0.1), (plain, 0.0)) if params]


def batch(name: str, step: int, rank: int, size: int) -> dict[str, torch.Tensor]:
    """Slice `rank` of `size` of the global batch of a step."""
    mine = samples("tokens" if name in ("mixed", "llama-tied") else "mlp", BATCH * (step + 1))[
        BATCH * step + rank :: size
    ]
    return {key: torch.stack([sample[key] for sample in mine]) for key in mine[0]}


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-3, amsgrad=True, foreach=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}
