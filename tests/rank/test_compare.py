"""`%ddl check`: what counts as equal, and how differences are told; the ranks are namespaces of this process."""

from __future__ import annotations

import random
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddl_magics import comparison
from ddl_magics.rank import compare, digest

pytestmark = pytest.mark.timeout(30)


class Ranks:
    """Answers as ranks with these namespaces would, and counts what it was asked."""

    def __init__(self, monkeypatch, namespaces):
        self.told = [{} for _ in namespaces]
        self.kernels = [
            SimpleNamespace(
                shell=SimpleNamespace(user_ns=namespace),
                runner=SimpleNamespace(context=SimpleNamespace(world=SimpleNamespace(rank=rank), prepared_models=list)),
            )
            for rank, namespace in enumerate(namespaces)
        ]
        self.asked = []
        self.now = 0
        monkeypatch.setattr(compare, "this_kernel", lambda: self.kernels[self.now])

    def ask(self, function, args):
        answers = {}
        for self.now, given in args.items():
            self.asked.append((function, self.now))
            compare._told.clear()
            compare._told.update(self.told[self.now])
            answers[self.now] = getattr(compare, function)(*given)
            self.told[self.now] = dict(compare._told)
        return answers


@pytest.fixture
def table(monkeypatch):
    """Rows for one name: its value on each rank, or a function of the rank."""

    def rows(*values, name="x"):
        namespaces = [{"x": value} for value in values]
        found = comparison.check([name], list(range(len(values))), Ranks(monkeypatch, namespaces).ask)
        return [(row.ranks, row.what, row.verdict) for row in found]

    return rows


Pair = namedtuple("Pair", "first second")


class Settings:
    def __init__(self, lr):
        self.lr = lr
        self.itself = self


EQUAL = [
    torch.tensor([float("nan"), 1.0]),
    torch.arange(6).view(2, 3).t(),
    torch.tensor(3, dtype=torch.bfloat16),
    torch.tensor([1 + 2j]).conj(),
    torch.eye(3).to_sparse(),
    torch.empty(0, 3),
    torch.ones(2, device="meta"),
    np.arange(4)[::-1],
    np.array(["a", "b"]),
    np.float32(1.5),
    {"a", "b", "c"},
    {"a": [1, (torch.ones(2), None)]},
    [],
    Pair(1, torch.ones(1)),
    Settings(0.1),
    torch.Generator().manual_seed(3),
    random.Random(3),
    len,
    nn.Linear,
    float("nan"),
    slice(1, 2),
]


@pytest.mark.parametrize("value", EQUAL, ids=lambda value: type(value).__name__)
def test_equal_values_are_equal_whatever_they_are(table, value):
    ((ranks, _, verdict),) = table(value, value, value)
    assert (ranks, verdict) == ("0-2", "equal")


DIFFERENT = [
    (torch.zeros(3), torch.zeros(4)),
    (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    (torch.tensor(0.0), torch.tensor(-0.0)),
    (torch.tensor(1.0), torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))),
    (torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()),
    (np.arange(3), np.arange(3.0)),
    (1, 1.0),
    ("a", "b"),
    ([1], (1,)),
    ([], {}),
    ({"a": 1}, {"a": 1, "b": 2}),
    (Settings(0.1), Settings(0.2)),
    (torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)),
    (nn.Linear, nn.Conv2d),
    (lambda: 1, lambda x: x),
    (None, torch.zeros(1)),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=lambda value: type(value).__name__)
def test_different_values_are_told_apart(table, one, other):
    rows = table(one, other, one)
    assert [ranks for ranks, _, _ in rows] == ["0,2", "1"]
    assert rows[0][2] == "agree"
    assert rows[1][2].startswith("differs")


def test_strides_and_storage_do_not_matter(table):
    whole = torch.randn(70, 80)
    assert table(whole, whole.t().contiguous().t(), torch.cat([whole, whole])[70:])[0][2] == "equal"


@pytest.mark.parametrize("place", [0, 65_535, 65_536, 199_999])
def test_a_digest_reads_large_tensors_piece_by_piece_in_the_order_of_their_elements(monkeypatch, place):
    monkeypatch.setattr(digest, "READ", 2 * digest.CHUNK)
    whole = torch.arange(200_000.0).view(500, 400)
    copy = whole.t().contiguous().t()
    assert not copy.is_contiguous()
    assert digest.chunks(copy) == digest.chunks(whole)
    changed = copy.clone(memory_format=torch.preserve_format)
    changed[place // 400, place % 400] += 1
    apart = [i for i, (a, b) in enumerate(zip(digest.chunks(changed), digest.chunks(whole), strict=True)) if a != b]
    assert apart == [place // 65_536]
    assert digest.values(changed, apart[0])[place % 65_536] == place + 1
    strided = torch.arange(400_000.0)[::2]
    assert digest.of_tensor(strided) == digest.of_tensor(strided.contiguous())


def test_how_far_tensors_are_apart(table):
    one = torch.ones(1000, 1000)
    other = one.clone()
    other[3, 4], other[999, 999] = 1.5, 0.75
    assert table(one, other)[1][2] == "differs: 2 elements, by at most 0.5"
    assert table(one, other + 1)[1][2] == "differs: 262,144 elements or more, by 1.5 or more"
    assert table(torch.tensor([1.0, 2.0]), torch.tensor([float("nan"), 2.0]))[1][2] == "differs: 1 element, 1 NaN here"
    assert "equal as numbers, other bits" in table(torch.tensor([0.0, 1]), torch.tensor([-0.0, 1]))[1][2]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (torch.tensor(2**62), torch.tensor(2**62 + 1), "1 element, by 1"),
        (torch.tensor([2**63 - 1, -(2**63)]), torch.tensor([-(2**63), -(2**63) + 1]),
         "2 elements, by at most 18,446,744,073,709,551,615"),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([2**64 - 2], dtype=torch.uint64),
         "1 element, by 1"),
        (torch.tensor([2**53, 2**53 + 1])[::2], torch.tensor([2**53 + 1]), "1 element, by 1"),
        (torch.tensor([True, True]), torch.tensor([True, False]), "1 element, by 1"),
        (np.array([2**62]), np.array([2**62 + 1]), "1 element, by 1"),
    ],
)  # fmt: skip
def test_integers_are_compared_exactly(table, one, other, said):
    assert table(one, other)[1][2] == f"differs: {said}"


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_of_a_module_the_first_parameter_that_differs_is_named_and_how_many_do(table):
    one, other, mode = net(), net(), net().eval()
    with torch.no_grad():
        other[1].bias[0] += 0.5
        other[2].weight.mul_(2)
        other[1].running_mean.add_(1)
    rows = table(one, net(), other, mode)
    assert rows[0] == ("0-1", "Sequential, 6 parameters, 3 buffers, 176 B", "agree")
    said = "differs in 2 of 6 parameters, 1 of 3 buffers, first 1.bias: 1 element, by 0.5"
    assert rows[1] == ("2", rows[0][1], said)
    assert rows[2][2] == "differs in 1 of 1 value, first training: bool False, on rank 0 bool True"


def stepped(lr=0.1, factor=1.0):
    model = net()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": lr}])
    (model(torch.ones(5, 3) * torch.arange(5.0)[:, None]) * factor).sum().backward()
    optimizer.step()
    return optimizer


def test_of_an_optimizer_state_and_settings_are_compared(table):
    assert table(stepped(), stepped())[0][2] == "equal"
    assert table(stepped(), stepped(lr=0.2))[1][2].endswith(
        "first param_groups[1]['lr']: float 0.2, on rank 0 float 0.1"
    )
    assert "first state[0]['exp_avg']: " in table(stepped(), stepped(factor=3.0))[1][2]


def test_a_schedule_is_compared_by_its_state(table):
    def schedule(steps):
        found = torch.optim.lr_scheduler.StepLR(stepped(), 10)
        found.optimizer.step()
        for _ in range(steps):
            found.step()
        return found

    assert table(schedule(2), schedule(2))[0][2] == "equal"
    assert "first ['last_epoch']: int 3, on rank 0 int 2" in table(schedule(2), schedule(3))[1][2]


def test_a_nested_path_is_named(table):
    rows = table({"a": [1, {"b": torch.ones(2)}]}, {"a": [1, {"b": torch.zeros(2)}]})
    assert rows[1][2] == "differs in 1 of 2 values, first ['a'][1]['b']: 2 elements, by at most 1"
    assert table({"a": 1}, {"a": 1, "b": 2})[1][2] == "differs in 1 of 2 values, first ['b'], which is only on rank 1"
    assert table({"a": 1, "b": 2}, {"a": 1})[1][2] == "differs in 1 of 1 value, first ['b'], which is only on rank 0"


def test_loaders_are_compared_by_length_and_not_by_their_samples(table):
    def loader(n):
        return DataLoader(TensorDataset(torch.randn(n, 2)), batch_size=2)

    assert table(loader(4), loader(4))[0][1:] == ("DataLoader, length 2", "equal")
    assert [what for _, what, _ in table(loader(4), loader(6))] == ["DataLoader, length 2", "DataLoader, length 3"]


def test_what_cannot_be_compared_is_said_to_be(table):
    class Opaque:
        __slots__ = ()

        def __reduce_ex__(self, protocol):
            raise TypeError("no")

    assert table(Opaque(), Opaque())[0][2] == "equal; 1 value compared by type alone"


def test_missing_names_and_expressions_that_fail_are_one_line_each(monkeypatch):
    ranks = Ranks(monkeypatch, [{"x": [1]}, {}, {"x": [1, 2]}])
    rows = comparison.check(["x", "x[1]", "1/0"], [0, 1, 2], ranks.ask)
    assert [(row.name, row.ranks, row.verdict) for row in rows] == [
        ("x", "0", ""),
        ("x", "2", "differs in 1 of 2 values, first [1], which is only on rank 2"),
        ("x", "1", "there is no such variable"),
        ("x[1]", "2", "on one rank only"),
        ("x[1]", "0", "IndexError: list index out of range"),
        ("x[1]", "1", "NameError: name 'x' is not defined"),
        ("1/0", "0-2", "ZeroDivisionError: division by zero"),
    ]


def test_an_expression_changes_no_variable(monkeypatch):
    namespace = {"x": 1}
    comparison.check(["(x := 5)", "x"], [0], Ranks(monkeypatch, [namespace]).ask)
    assert namespace["x"] == 1
    assert "y" not in namespace


def test_ranks_that_agree_are_asked_once_however_much_they_hold(monkeypatch):
    ranks = Ranks(monkeypatch, [{"x": net()} for _ in range(4)])
    comparison.check(["x"], [0, 1, 2, 3], ranks.ask)
    assert ranks.asked == [("survey", rank) for rank in range(4)]


def test_random_states_are_named_one_by_one(monkeypatch):
    ranks = Ranks(monkeypatch, [{}, {}])
    states = random.getstate(), torch.get_rng_state()
    try:
        rows = comparison.check(["rng"], [0, 1], ranks.ask)
        assert [(row.what, row.verdict) for row in rows] == [("random states", "equal")]
        survey = compare.survey
        monkeypatch.setattr(compare, "survey", lambda names: (random.random(), torch.rand(1), survey(names))[-1])
        rows = comparison.check(["rng"], [0, 1], ranks.ask)
        assert rows[1].verdict == "differs in 2 of 3 random states: torch, python"
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])


class Sharded(torch.Tensor):
    """A parameter as ZeRO stage 3 holds it: nothing in itself, a part in `ds_tensor`; the group is gone."""


def shard(values, parts):
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_tensor = 0, torch.tensor(values)
    parameter.ds_shape, parameter.ds_numel = torch.Size([len(values) * parts]), len(values) * parts
    parameter.ds_process_group = None
    return parameter


def test_shards_are_not_called_different(table):
    def model(rank):
        found = nn.Module()
        found.whole = nn.Parameter(torch.ones(2))
        found.part = shard([float(rank), 1.0], 3)
        return found

    rows = table(model(0), model(1), model(2))
    assert rows == [("0-2", "Module, 2 parameters, 16.0 B", "1 of 2 tensors sharded over ranks 0-2; the rest is equal")]
    other = model(1)
    with torch.no_grad():
        other.whole[0] = 5
    assert table(model(0), other, model(2))[1][2] == "differs in 1 of 2 parameters, first whole: 1 element, by 4"


def survey(**digests):
    return {"head": "Net", "text": "", "digests": {key.replace("whole", ""): mark for key, mark in digests.items()},
            "sharded": 1, "leaves": 2, "tensors": 2, "nbytes": 8, "vague": 0}  # fmt: skip


def test_of_two_ranks_that_differ_in_one_shard_that_one_is_right_that_agrees_in_the_rest():
    surveys = {0: survey(whole="w", a="1"), 1: survey(whole="v", b="9"), 2: survey(whole="w", a="1"),
               3: survey(whole="w", b="2")}  # fmt: skip
    assert comparison.Name("x", surveys, None).groups() == [[0, 2, 3], [1]]


def test_copies_of_a_sharded_model_are_told_apart():
    surveys = {0: survey(a="1"), 1: survey(b="2"), 2: survey(a="1"), 3: survey(b="2")}
    (row,) = comparison.Name("x", surveys, None).rows()
    assert row.verdict == "1 of 2 tensors sharded over ranks 0-1, and again, equal, over 2-3; the rest is equal"
