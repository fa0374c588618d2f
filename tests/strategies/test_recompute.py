"""Activation checkpointing of models that bring none: which blocks, same gradients, fewer activations, and undone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ddl_magics.strategies.recompute import Recomputation
from tests.strategies.models import MLP, llama


class Block(nn.Module):
    """Draws random numbers in training, and counts its forwards."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))
        self.calls = 0

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return x + scale * self.body(x)


class Net(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def kept_bytes(model, x):
    """A forward's output, and bytes of what autograd keeps for its backward."""
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    return output, sum(kept.values())


def gradients(model, x):
    torch.manual_seed(3)
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_gradients_are_the_same_with_dropout_and_activations_fewer():
    model, x = Net(), torch.randn(64, 8)
    expected, (_, all_of_them) = gradients(model, x), kept_bytes(model, x)
    recomputation = Recomputation(model)
    assert recomputation.notes() == []
    torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)
    assert kept_bytes(model, x)[1] < 0.3 * all_of_them


def test_names_and_class_stay_and_undo_leaves_nothing_behind():
    model = Net()
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    recomputation = Recomputation(model)
    assert list(model.state_dict()) == list(Net().state_dict())
    assert type(model.blocks[0]) is Block
    recomputation.undo()
    recomputation.undo()
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == before


def test_without_gradients_each_block_runs_once():
    model = Net(2)
    Recomputation(model)
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert [block.calls for block in model.blocks] == [1, 1]
    model(torch.randn(4, 8)).sum().backward()
    assert [block.calls for block in model.blocks] == [3, 3]


def test_a_copy_of_the_model_computes_with_its_own_weights():
    model = Net(2)
    Recomputation(model)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert other(torch.randn(4, 8)).abs().sum() == 0
    assert model(torch.randn(4, 8)).abs().sum() > 0


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 8)),
        nn.ModuleDict({"h": nn.ModuleList([Block(), Block()])}),
        nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(8, 8)),
    ],
    ids=["beside others", "deeper", "a row in a row"],
)
def test_blocks_are_the_members_of_one_class(model):
    Recomputation(model)
    assert all("forward" in vars(part) for part in model.modules() if isinstance(part, Block))
    assert sum("forward" in vars(part) for part in model.modules()) == 2


def test_a_model_without_repeated_blocks_says_so():
    assert Recomputation(MLP()).notes() == [
        "Activation checkpointing finds no repeated blocks in this MLP, which keeps them all."
    ]


class TestModelsOfTransformers:
    def test_switch_on_their_own_and_off_again(self):
        model = llama(tied=True)
        recomputation = Recomputation(model)
        assert model.is_activation_checkpointing
        assert not model.model.embed_tokens._forward_hooks, "gradients of the embeddings' output are not wanted"
        recomputation.undo()
        assert not model.is_activation_checkpointing

    def test_say_that_eval_mode_keeps_all(self):
        (note,) = Recomputation(llama(tied=True).eval()).notes()
        assert note.endswith("call model.train().")

    def test_what_the_user_switched_on_stays_on(self):
        model = llama(tied=True)
        model.activation_checkpointing_enable()
        Recomputation(model).undo()
        assert model.is_activation_checkpointing
