"""The context on one rank, under `single`: models, accumulation, loops, memory, and mistakes in one line."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import time
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ddl_magics.errors import DDLError
from ddl_magics.protocol import CellRequest
from ddl_magics.rank.progress import count, to_device
from tests.one_rank import begin, one_rank


@pytest.fixture(scope="module")
def rank():
    return one_rank()


@pytest.fixture
def ddl(rank):
    begin(rank)
    yield rank
    rank.end_cell()
    rank.forget_dropped_models()
    assert rank._models.live() == []


class Output(NamedTuple):
    loss: torch.Tensor


class Pair(NamedTuple):
    a: Any
    b: Any


class Scale(torch.nn.Module):
    """y = w x, so that gradients can be done in the head."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))
        self.config = {"kind": "scale"}

    def forward(self, x, *, times=1):
        """Multiply."""
        return self.w * x * times

    def generate(self, length):
        return [self.w.item()] * length


def prepared(ddl, *more, lr=1.0, **options):
    model = Scale()
    return ddl.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), *more, **options)


class TestTheWrapper:
    def test_stands_for_the_module(self, ddl):
        model, _ = prepared(ddl)
        assert isinstance(model, Scale)
        assert isinstance(model, torch.nn.Module)
        assert model(torch.tensor(2.0), times=3).item() == 6
        assert model.config is ddl.unwrap(model).config
        assert [name for name, _ in model.named_parameters()] == ["w"]
        assert list(inspect.signature(model.forward).parameters) == ["x", "times"]
        assert model.forward(torch.tensor(2.0)).item() == 2
        assert type(ddl.unwrap(model)) is Scale
        assert "single" in repr(model)
        assert "config" in dir(model)

    def test_methods_that_give_the_module_give_the_wrapper(self, ddl):
        model, _ = prepared(ddl)
        assert model.eval() is model
        assert not ddl.unwrap(model).training
        assert model.train().to("cpu").requires_grad_() is model

    def test_attributes_are_set_on_the_module(self, ddl):
        model, _ = prepared(ddl)
        model.note = "x"
        assert ddl.unwrap(model).note == "x"
        del model.note
        assert not hasattr(model, "note")

    def test_state_dict_is_unprefixed_both_ways(self, ddl):
        model, _ = prepared(ddl)
        assert list(model.state_dict()) == ["w"]
        assert list(model.state_dict(prefix="scale.")) == ["scale.w"]
        model.load_state_dict({"w": torch.tensor(7.0)})
        assert ddl.full_state_dict(model)["w"].item() == 7
        result = model.load_state_dict({"v": torch.tensor(1.0)}, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["w"], ["v"])
        with pytest.raises(DDLError):
            model.load_state_dict({"v": torch.tensor(1.0)})

    def test_whole_weights_go_in_and_out_before_prepare_too(self, ddl):
        model = Scale()
        ddl.load_full_state_dict(model, {"w": torch.tensor(3.0)})
        assert ddl.full_state_dict(model)["w"].item() == 3

    def test_generate_is_the_module_s(self, ddl):
        model, _ = prepared(ddl)
        assert model.generate(length=2) == [1.0, 1.0]
        linear = ddl.prepare(torch.nn.Linear(1, 1))
        assert not hasattr(linear, "generate")

    def test_a_copy_is_of_the_module(self, ddl):
        model, _ = prepared(ddl)
        twin = copy.deepcopy(model)
        assert type(twin) is Scale
        assert twin.w is not model.w

    def test_pickling_says_what_to_do(self, ddl):
        import pickle

        model, _ = prepared(ddl)
        with pytest.raises(DDLError, match="full_state_dict"):
            pickle.dumps(model)

    def test_dropping_the_last_name_frees_model_and_optimizer(self, ddl):
        model, optimizer = prepared(ddl)
        training = ddl._models.live()[0]
        module = weakref.ref(ddl.unwrap(model))
        state = weakref.ref(optimizer)
        ddl.backward(model(torch.tensor(1.0)))
        ddl.step()
        del model
        assert training.closed
        assert ddl._models.live() == []
        del optimizer, training
        gc.collect()
        assert module() is None
        assert state() is None


class TestPrepare:
    def test_gives_the_same_kinds_in_the_same_order(self, ddl):
        model = Scale()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader = DataLoader(torch.arange(4.0), batch_size=2)
        made = ddl.prepare(loader, schedule, optimizer, model)
        assert [isinstance(x, t) for x, t in zip(made, (DataLoader, object, object, Scale), strict=True)] == [True] * 4
        assert made[1] is schedule
        assert made[2].param_groups[0]["params"][0] is ddl.unwrap(made[3]).w

    def test_takes_a_model_alone_for_inference(self, ddl):
        model = ddl.prepare(Scale())
        assert model(torch.tensor(2.0)).item() == 2
        with pytest.raises(DDLError, match="Scale was prepared without an optimizer"):
            ddl.step(model=model)

    def test_takes_a_loader_alone(self, ddl):
        assert len(ddl.prepare(DataLoader(torch.arange(4.0), batch_size=2))) == 2

    @pytest.mark.parametrize(
        ("objects", "said"),
        [
            (lambda: (), "prepare was given nothing"),
            (lambda: (Scale(), Scale()), "given two models"),
            (lambda: (Scale(), 3), "cannot use a int"),
            (lambda: (torch.optim.SGD(Scale().parameters(), lr=1),), "an optimizer without its model"),
            (lambda: (Scale(), torch.optim.SGD(Scale().parameters(), lr=1)), "holds no parameter of this Scale"),
            (
                lambda: (torch.optim.lr_scheduler.StepLR(torch.optim.SGD(Scale().parameters(), lr=1), 1),),
                "a schedule without its optimizer",
            ),
        ],
    )
    def test_what_cannot_go_together_is_one_line(self, ddl, objects, said):
        with pytest.raises(DDLError, match=said):
            ddl.prepare(*objects())

    def test_two_optimizers_are_one_line(self, ddl):
        model = Scale()
        with pytest.raises(DDLError, match="given two optimizers"):
            ddl.prepare(model, *(torch.optim.SGD(model.parameters(), lr=1) for _ in range(2)))

    def test_a_model_prepared_twice_is_one_line(self, ddl):
        model, _ = prepared(ddl)
        with pytest.raises(DDLError, match="prepared already"):
            ddl.prepare(model)

    @pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "2"])
    def test_accumulate_must_be_a_number_of_batches(self, ddl, accumulate):
        with pytest.raises(DDLError, match="accumulate="):
            prepared(ddl, accumulate=accumulate)

    def test_unknown_precision_is_one_line(self, ddl):
        with pytest.raises(DDLError, match="no precision 'fp8'"):
            prepared(ddl, precision="fp8")

    def test_bf16_mixed_computes_in_bf16_with_fp32_weights(self, ddl):
        model = torch.nn.Linear(2, 2)
        model, _ = ddl.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="bf16-mixed")
        assert model(torch.ones(1, 2)).dtype == torch.bfloat16
        assert model.weight.dtype == torch.float32


class TestModelInit:
    def test_gives_the_weights_of_the_seed_and_leaves_the_random_state(self, ddl):
        torch.manual_seed(0)
        wanted = torch.nn.Linear(2, 2).weight
        torch.manual_seed(99)
        expected = torch.rand(1)
        torch.manual_seed(99)
        with ddl.model_init():
            model = torch.nn.Linear(2, 2)
        with ddl.model_init(seed=1):
            other = torch.nn.Linear(2, 2)
        assert torch.equal(model.weight, wanted)
        assert not torch.equal(other.weight, wanted)
        assert torch.equal(torch.rand(1), expected)

    def test_the_cell_s_seed_is_the_default(self, rank):
        begin(rank, seed=5)
        first = torch.rand(1), random.random()
        with rank.model_init():
            model = torch.nn.Linear(2, 2)
        begin(rank, seed=5)
        assert (torch.rand(1), random.random()) == first
        torch.manual_seed(5)
        assert torch.equal(torch.nn.Linear(2, 2).weight, model.weight)


class TestAccumulation:
    def gradients(self, ddl, length, accumulate, epochs=1):
        """Weights after each call of step, training w on batches 1, 2, ... with a loss of w x."""
        loader = DataLoader(torch.arange(1.0, length + 1), batch_size=1)
        model, _, loader = prepared(ddl, loader, accumulate=accumulate)
        moved, before = [], 1.0
        for x in ddl.track(loader, epochs=epochs):
            ddl.backward(model(x).mean())
            norm = ddl.step(max_norm=1e9)
            now = ddl.unwrap(model).w.item()
            moved.append(round(before - now, 5))
            assert (norm is None) == (now == before)
            before = now
        return moved

    def test_each_step_follows_the_mean_of_its_batches_also_the_short_last(self, ddl):
        assert self.gradients(ddl, 5, 2, epochs=2) == 2 * [0, 1.5, 0, 3.5, 5]

    def test_one_group_longer_than_the_epoch(self, ddl):
        assert self.gradients(ddl, 3, 8) == [0, 0, 2]

    def test_without_a_loader_calls_are_counted(self, ddl):
        model, _ = prepared(ddl, accumulate=2)
        norms = []
        for x in (1.0, 2.0, 3.0, 4.0):
            ddl.backward(model(torch.tensor(x)))
            norms.append(ddl.step(max_norm=10.0))
        assert [None if norm is None else float(norm) for norm in norms] == [None, 1.5, None, 3.5]

    def test_a_stream_s_last_batch_acts(self, ddl):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter([1.0, 2.0, 3.0])

        model, _, loader = prepared(ddl, DataLoader(Stream(), batch_size=1), accumulate=2)
        acted = []
        for x in loader:
            ddl.backward(model(x).mean())
            acted.append(ddl.step(max_norm=10.0) is not None)
        assert acted == [False, True, True]

    def test_two_losses_before_a_step_both_count(self, ddl):
        model, _ = prepared(ddl)
        ddl.backward(model(torch.tensor(1.0)))
        ddl.backward(model(torch.tensor(2.0)))
        assert float(ddl.step(max_norm=10.0)) == 3

    def test_the_schedule_moves_with_the_optimizer(self, ddl):
        model = Scale()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, schedule = ddl.prepare(model, optimizer, schedule, accumulate=2)
        rates = []
        for _ in range(4):
            ddl.backward(model(torch.tensor(1.0)))
            ddl.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates == [1.0, 0.5, 0.5, 0.25]

    def test_a_schedule_that_wants_a_metric_is_left_to_the_user(self, ddl):
        model = Scale()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, *_ = ddl.prepare(model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
        ddl.backward(model(torch.tensor(1.0)))
        ddl.step()
        assert ddl.recorder.drain()["notes"] == ("ReduceLROnPlateau wants a metric: call its step(metric) yourself.",)


class TestMistakes:
    def test_before_prepare(self, ddl):
        with pytest.raises(DDLError, match="backward was called and no model is prepared"):
            ddl.backward(torch.ones((), requires_grad=True))
        with pytest.raises(DDLError, match="step was called and no model is prepared"):
            ddl.step()

    def test_step_without_a_gradient(self, ddl):
        _model = prepared(ddl)
        with pytest.raises(DDLError, match="there is no gradient yet"):
            ddl.step()

    def test_two_models_and_no_word_which(self, ddl):
        one, _ = prepared(ddl)
        two, _ = prepared(ddl)
        with pytest.raises(DDLError, match=r"which of Scale, Scale is meant. Write ddl.backward\(..., model=...\)"):
            ddl.backward(one(torch.tensor(1.0)) + two(torch.tensor(1.0)))
        ddl.backward(two(torch.tensor(1.0)), model=two)
        ddl.step(model=two)
        assert (one.w.item(), two.w.item()) == (1.0, 0.0)

    def test_of_two_models_the_one_that_this_cell_uses_is_meant(self, rank):
        begin(rank)
        one, _ = prepared(rank)
        two, _ = prepared(rank)
        begin(rank)
        rank.backward(two(torch.tensor(1.0)))
        rank.step()
        assert (one.w.item(), two.w.item()) == (1.0, 0.0)

    def test_a_model_of_this_cell_is_meant_before_older_ones(self, rank):
        begin(rank)
        old, _ = prepared(rank)
        begin(rank)
        new, _ = prepared(rank)
        rank.backward(new(torch.tensor(1.0)))
        rank.step()
        assert (old.w.item(), new.w.item()) == (1.0, 0.0)

    def test_a_model_for_inference_does_not_confuse(self, ddl):
        _teacher = ddl.prepare(Scale())
        model, _ = prepared(ddl)
        ddl.backward(model(torch.tensor(1.0)))
        ddl.step()

    @pytest.mark.parametrize(
        ("loss", "said"),
        [
            (lambda w: w.item(), "given a float"),
            (Output, "output.loss"),
            (lambda w: w * torch.ones(3), r"shape \(3,\). Take its mean"),
            (lambda w: w.detach(), "no graph"),
        ],
    )
    def test_what_is_no_loss(self, ddl, loss, said):
        model, _ = prepared(ddl)
        with pytest.raises(DDLError, match=said):
            ddl.backward(loss(model.w))

    def test_model_that_is_none(self, ddl):
        with pytest.raises(DDLError, match="was given a Scale"):
            ddl.step(model=Scale())

    def test_log_wants_one_number(self, ddl):
        with pytest.raises(DDLError, match=r"log\(x=...\) takes one number"):
            ddl.log(x=torch.ones(2))


class TestRecording:
    def test_losses_of_the_rank_are_recorded_unscaled_and_in_order(self, ddl):
        loader = DataLoader(torch.arange(1.0, 6), batch_size=2)
        model, _, loader = prepared(ddl, loader, accumulate=2, lr=0.0)
        for x in ddl.track(loader):
            ddl.backward(model(x).mean())
            ddl.step()
            ddl.log(rate=0.5)
        points = ddl.recorder.drain()["points"]
        losses = [(p.step, p.value, p.weight) for p in points if p.name == "loss"]
        assert losses == [(1, 1.5, 2.0), (2, 3.5, 2.0), (3, 5.0, 1.0)]
        assert [(p.step, p.value) for p in points if p.name == "rate"] == [(1, 0.5), (2, 0.5), (3, 0.5)]

    def test_each_of_several_models_has_its_curve(self, ddl):
        one, _ = prepared(ddl)
        two, _ = prepared(ddl)
        for model in (one, two, two):
            ddl.backward(model(torch.tensor(1.0)), model=model)
        names = [(p.name, p.step) for p in ddl.recorder.drain()["points"]]
        assert names == [("loss", 1), ("loss 2", 1), ("loss 2", 2)]

    def test_token_weights_are_what_the_point_weighs(self, ddl):
        model, _ = prepared(ddl)
        with ddl_group():
            ddl.backward(model(torch.tensor(1.0)), weight=17)
        assert ddl.recorder.drain()["points"][0].weight == 17


def ddl_group():
    """A default group of one, as a cell under `single` has."""
    import contextlib

    import torch.distributed as dist

    @contextlib.contextmanager
    def opened():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    return opened()


class TestTrack:
    def test_says_how_far_and_how_fast(self, ddl):
        tokens = torch.zeros(8, 16, dtype=torch.long)
        loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=2)
        for _ in ddl.track(loader, epochs=2):
            time.sleep(0.02)
        progress = ddl.recorder.drain()["progress"]
        assert (progress.step, progress.total, progress.epoch, progress.epochs) == (8, 8, 1, 2)
        assert progress.finished
        assert 0.02 <= progress.seconds_per_step < 1
        assert progress.tokens_per_second == pytest.approx(32 / progress.seconds_per_step)
        assert progress.samples_per_second == pytest.approx(2 / progress.seconds_per_step)

    def test_takes_a_plain_range_or_generator(self, ddl):
        assert list(ddl.track(range(3), epochs=2)) == [0, 1, 2, 0, 1, 2]
        assert list(ddl.track((n for n in range(3)), total=7)) == [0, 1, 2]
        progress = ddl.recorder.drain()["progress"]
        assert (progress.step, progress.total, progress.tokens_per_second) == (3, 7, None)

    def test_an_unfinished_loop_is_not_called_finished(self, ddl):
        for step in ddl.track(range(100)):
            if step == 3:
                break
        assert not ddl.recorder.drain()["progress"].finished

    @pytest.mark.parametrize(
        ("batch", "counted"),
        [
            ({"input_ids": torch.zeros(2, 5, dtype=torch.long)}, (10, 2)),
            ({"pixel_values": torch.zeros(3, 8, 8), "labels": torch.zeros(3, dtype=torch.long)}, (0, 3)),
            ((torch.zeros(2, 5, dtype=torch.long), torch.zeros(2)), (10, 2)),
            ([torch.zeros(4, 3)], (0, 4)),
            (torch.zeros(2, 5, dtype=torch.long), (10, 2)),
            (7, (0, 0)),
            ({}, (0, 0)),
        ],
    )
    def test_tokens_and_samples_of_a_batch(self, batch, counted):
        assert count(batch) == counted

    def test_batches_move_to_the_device_whatever_holds_them(self):
        x = torch.ones(1)
        moved = to_device({"list": [x, 3], "pair": Pair(x, "text")}, torch.device("meta"))
        assert moved["list"][0].device.type == moved["pair"].a.device.type == "meta"
        assert (moved["list"][1], moved["pair"].b, type(moved["pair"])) == (3, "text", Pair)


class TestMemory:
    def test_kinds_are_those_of_the_live_models(self, ddl):
        model = torch.nn.Linear(1000, 1000, bias=False)
        model, optimizer = ddl.prepare(model, torch.optim.AdamW(model.parameters()))
        size = 4_000_000
        assert ddl.memory()["parameters"] == size
        ddl.backward(model(torch.ones(1, 1000)).mean())
        ddl.step()
        memory, peak = ddl.memory(), ddl.peak_memory()
        assert memory["optimizer"] == pytest.approx(2 * size, rel=1e-3)
        assert peak["gradients"] == size
        kinds = ("parameters", "gradients", "optimizer", "other", "reserved")
        assert set(memory) == {*kinds, "total", "capacity", "resident"}
        assert memory["resident"] > memory["total"]
        assert sum(memory[kind] for kind in kinds) == memory["total"] <= peak["total"]
        del model, optimizer
        assert ddl.memory()["parameters"] == 0

    def test_activations_count_as_other_and_what_was_there_before_does_not(self, rank):
        kept = torch.ones(8 * 2**20)
        begin(rank)
        model, _ = rank.prepare(layer := torch.nn.Linear(64, 64, bias=False), torch.optim.SGD(layer.parameters(), 0.1))
        loss = model(torch.ones(2**16, 64)).relu().sum()
        activations = 2 * 2**16 * 64 * 4  # what backward needs: the input and the relu's output
        rank.backward(loss)
        rank.step()
        assert rank.peak_memory()["other"] == pytest.approx(activations, rel=0.1)
        assert rank.memory()["other"] < 0.2 * kept.nbytes

    def test_the_peak_is_of_the_cell(self, rank):
        begin(rank)
        model, _ = prepared(rank)
        rank.backward(model(torch.tensor(1.0)))
        rank.step()
        assert rank.peak_memory()["gradients"] == 4
        begin(rank)
        assert rank.peak_memory()["gradients"] == 0


def test_where_a_rank_of_one_is(ddl):
    assert (ddl.rank, ddl.world_size, ddl.local_rank, ddl.local_world_size, ddl.node_rank) == (0, 1, 0, 1, 0)
    assert (str(ddl.device), ddl.strategy) == ("cpu", "single")
    with ddl.first(), ddl.first(local=True):
        ddl.print("first and only")


def test_a_strategy_that_cannot_run_here_is_refused_at_the_start_of_its_cell(rank):
    with pytest.raises(DDLError, match="no strategy 'dpp'"):
        rank.begin_cell(CellRequest(code="", cell=1, run="r", name="", strategy="dpp"))
