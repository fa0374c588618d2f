"""After a load everything goes on as if nothing had happened: batches, rates, random numbers, the panel."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ddl_magics.errors import CheckpointError, DDLError
from ddl_magics.rank.checkpoint import randomness
from ddl_magics.rank.data import split
from ddl_magics.rank.position import Position
from tests.checkpoint.small import SAMPLES, prepare, train
from tests.one_rank import begin

pytestmark = pytest.mark.timeout(60)
BATCHES = 3
"""In an epoch of `small`."""


def notes(ddl):
    return ddl.recorder.drain()["notes"]


class TestTheLoop:
    @pytest.mark.parametrize("steps", [1, 3, 5, 9])
    def test_goes_on_with_the_batches_of_an_uninterrupted_run(self, ddl, tmp_path, steps):
        whole, *_, loader = prepare(ddl)
        expected = train(ddl, whole, loader, epochs=3)
        model, *_, loader = prepare(ddl)
        before = train(ddl, model, loader, epochs=3, steps=steps)
        folder = ddl.save(tmp_path, model)
        begin(ddl, seed=5)  # whose order of the data is another
        other, *_, loader = prepare(ddl, seed=9)
        loaded = ddl.load(tmp_path, other)
        assert (loaded.folder, loaded.step, loaded.epoch) == (folder, steps, steps // BATCHES)
        assert before + train(ddl, other, loader, epochs=3) == expected
        assert len(expected) == 9

    def test_an_outer_loop_over_epochs_passes_over_those_that_are_done(self, ddl, tmp_path):
        model, *_, loader = prepare(ddl)
        expected = [train(ddl, model, loader) for _ in range(3)]
        model, *_, loader = prepare(ddl)
        train(ddl, model, loader, epochs=2, steps=4)
        ddl.save(tmp_path, model)
        begin(ddl)
        model, *_, loader = prepare(ddl)
        ddl.load(tmp_path, model)
        assert [train(ddl, model, loader) for _ in range(3)] == [[], expected[1][1:], expected[2]]
        assert len(train(ddl, model, loader)) == BATCHES
        assert "1 of 1 epochs were trained before the checkpoint, and are passed over." in notes(ddl)

    def test_a_loop_without_track_goes_on_in_the_middle_too(self, ddl, tmp_path):
        model, *_, loader = prepare(ddl)
        train(ddl, model, loader, epochs=2, steps=4)
        ddl.save(tmp_path, model)
        other, *_, again = prepare(ddl)
        ddl.load(tmp_path, other)
        rest = list(again)
        assert len(rest) == 2
        assert again.share is None
        assert len(list(again)) == BATCHES
        assert [len(list(ddl.track(again))), again.bookmark.behind] == [BATCHES, 0]

    def test_progress_counts_what_was_done(self, ddl, tmp_path):
        model, *_, loader = prepare(ddl)
        train(ddl, model, loader, epochs=3, steps=4)
        ddl.save(tmp_path, model)
        begin(ddl)
        model, *_, loader = prepare(ddl)
        ddl.load(tmp_path, model)
        for x in ddl.track(loader, epochs=3):
            first = ddl.recorder.drain()["progress"]
            ddl.backward(model(x).mean(), model=model)
            ddl.step(model=model)
            break
        assert (first.step, first.total, first.epoch, first.epochs) == (4, 9, 1, 3)
        assert [p.step for p in ddl.recorder.drain()["points"]] == [5]

    def test_a_save_in_the_middle_of_a_group_does_the_group_again(self, ddl, tmp_path):
        def build():
            with ddl.model_init():
                model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            return ddl.prepare(model, optimizer, DataLoader(SAMPLES, batch_size=2, shuffle=True), accumulate=4)

        torch.manual_seed(0)
        model, _, loader = build()
        losses = []
        for x in ddl.track(loader):
            losses.append((loss := model(x).pow(2).mean()).item())
            ddl.backward(loss, model=model)
            ddl.step(model=model)
            if len(losses) == 5:  # the second group has the last two batches of six, and one of them is begun
                ddl.save(tmp_path, model)
        weights = model.state_dict()
        again, _, loader = build()
        assert ddl.load(tmp_path, again).step == 1
        assert train(ddl, again, loader) == losses[4:]
        assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())

    def test_a_batch_that_was_given_out_and_not_trained_comes_again(self, ddl, tmp_path):
        model, *_, loader = prepare(ddl)
        seen = []
        for x in ddl.track(loader):
            seen.append(x)
            if len(seen) == 2:
                ddl.save(tmp_path, model)
            ddl.backward(model(x).mean(), model=model)
            ddl.step(model=model)
        other, *_, again = prepare(ddl)
        ddl.load(tmp_path, other)
        assert all(torch.equal(a, b) for a, b in zip(ddl.track(again), seen[1:], strict=True))

    def test_saved_again_right_after_a_load_it_is_the_same_place(self, ddl, tmp_path):
        model, *_, loader = prepare(ddl)
        train(ddl, model, loader, epochs=3, steps=5)
        ddl.save(tmp_path / "a", model)
        place = loader.bookmark.position()
        other, *_, again = prepare(ddl)
        ddl.load(tmp_path / "a", other)
        ddl.save(tmp_path / "b", other)
        third, *_, last = prepare(ddl)
        ddl.load(tmp_path / "b", third)
        assert again.bookmark.position() == last.bookmark.position() == place
        assert (place.epoch, place.batches, place.items, place.epochs) == (1, 2, 8, 1)

    def test_evaluation_between_leaves_the_place_alone(self, ddl, tmp_path):
        with ddl.model_init():
            model = torch.nn.Linear(3, 1)
        held_out = DataLoader(SAMPLES, batch_size=6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = ddl.prepare(model, optimizer, DataLoader(SAMPLES, batch_size=4, shuffle=True), held_out)
        model, _, loader, held_out = parts
        train(ddl, model, loader, steps=2)
        for _ in ddl.track(held_out):
            break
        ddl.save(tmp_path, model)
        places = [one.bookmark.position() for one in (loader, held_out)]
        assert [(place.epoch, place.batches, place.epochs) for place in places] == [(0, 2, 0), (1, 0, 0)]


START = Position(seed=4, length=60)


class TestLoaders:
    def place(self, batch_size, size, per_rank, batches):
        loader = DataLoader(range(60), batch_size=batch_size, shuffle=True)
        mine = split(loader, rank=0, size=size, seed=4, batch="per-rank" if per_rank else "global", note=print)
        for _, _ in zip(range(batches), mine, strict=False):
            mine.bookmark.trained()
        return mine.bookmark.position()

    def rest(self, position, batch_size, size, per_rank):
        """Samples of the epoch that are left, in order, over all ranks."""
        loader = DataLoader(range(60), batch_size=batch_size, shuffle=True)
        batch = "per-rank" if per_rank else "global"
        ranks = [split(loader, rank=rank, size=size, seed=0, batch=batch, note=print) for rank in range(size)]
        for one in ranks:
            assert one.bookmark.take_up(position) == ""
        shares, found = [], []
        for batches in zip(*ranks, strict=True):
            shares.append(ranks[0].share)
            found += [int(sample) for part in batches for sample in part]
        return found, [share.index for share in shares], [share.last for share in shares]

    @pytest.mark.parametrize(("batch_size", "size", "per_rank"), [(6, 1, False), (6, 3, False), (3, 2, True)])
    def test_go_on_at_the_same_sample_at_any_number_of_ranks(self, batch_size, size, per_rank):
        position = self.place(6, 2, per_rank=False, batches=4)
        assert (position.batches, position.items, position.length) == (4, 24, 60)
        whole, _, _ = self.rest(START, 6, 1, per_rank=False)
        found, indices, last = self.rest(position, batch_size, size, per_rank)
        assert sorted(whole) == list(range(60))
        assert found == whole[24:]
        assert indices == [4, 5, 6, 7, 8, 9]
        assert last == [False] * 5 + [True]

    def test_go_on_at_the_same_sample_with_another_batch_size(self):
        position = self.place(4, 2, per_rank=True, batches=3)  # global batches of 8
        whole, _, _ = self.rest(START, 6, 1, per_rank=False)
        found, indices, last = self.rest(position, 10, 1, per_rank=False)
        assert found == whole[24:]
        assert (indices, last) == ([3, 4, 5, 6], [False, False, False, True])

    def test_a_batch_sampler_of_the_user_s_goes_on_at_the_same_batch(self):
        def build():
            own = DataLoader(range(10), batch_sampler=[[0], [1, 2], [3, 4, 5], [6], [7, 8, 9]])
            return split(own, rank=0, size=1, seed=0, batch="global", note=print)

        first, again = build(), build()
        for _, _ in zip(range(2), first, strict=False):
            first.bookmark.trained()
        again.bookmark.take_up(first.bookmark.position())
        assert [batch.tolist() for batch in again] == [[3, 4, 5], [6], [7, 8, 9]]

    def test_one_that_is_left_alone_reads_again_what_was_done(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(range(10))

        def build():
            return split(DataLoader(Stream(), batch_size=2), rank=0, size=1, seed=0, batch="global", note=print)

        first, again = build(), build()
        for _, _ in zip(range(2), first, strict=False):
            first.bookmark.trained()
        assert "reads again" in again.bookmark.take_up(first.bookmark.position())
        assert [batch.tolist() for batch in again] == [[4, 5], [6, 7], [8, 9]]
        assert len(list(again)) == 5

    @pytest.mark.parametrize("persistent", [False, True])
    def test_with_workers_goes_on_at_the_same_sample(self, persistent):
        def build():
            options = {"num_workers": 2, "persistent_workers": persistent}
            own = DataLoader(range(20), batch_size=4, shuffle=True, **options)
            return split(own, rank=0, size=1, seed=4, batch="global", note=print)

        first, again = build(), build()
        whole = []
        for _, batch in zip(range(2), first, strict=False):
            first.bookmark.trained()
            whole += batch.tolist()
        again.bookmark.take_up(first.bookmark.position())
        assert first.bookmark.position().items == 8
        rest, shares = [], []
        for batch in again:
            rest += batch.tolist()
            shares.append((again.share.index, again.share.last))
        assert sorted(whole + rest) == list(range(20))
        assert shares == [(2, False), (3, False), (4, True)]
        assert len(list(again)) == 5

    def test_another_data_set_begins_its_epoch_anew_and_says_so(self):
        def build(length):
            return split(DataLoader(range(length), batch_size=2), rank=0, size=1, seed=0, batch="global", note=print)

        first, other = build(8), build(6)
        for _, _ in zip(range(2), first, strict=False):
            first.bookmark.trained()
        assert "begins anew" in other.bookmark.take_up(first.bookmark.position())
        assert len(list(other)) == 3


class TestRandomness:
    def test_of_python_numpy_and_torch_goes_on(self, ddl, tmp_path):
        def draw():
            return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()

        model, *_ = prepare(ddl)
        draw()  # a gauss is kept for the next call
        ddl.save(tmp_path, model)
        expected = draw()
        ddl.load(tmp_path, model)
        assert draw() == expected

    def test_a_rank_that_is_new_gets_its_own(self):
        states = [randomness.take()]
        drawn = []
        for rank in (0, 1, 2, 1):
            randomness.give(states, rank)
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
        assert drawn[1] == drawn[3]
        assert len({*drawn}) == 3


OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
schedules = torch.optim.lr_scheduler
SCHEDULES = [
    lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: schedules.MultiStepLR(o, [3, 7, 7]),
    lambda o: schedules.OneCycleLR(o, 0.5, total_steps=20),
    lambda o: schedules.CyclicLR(o, 0.1, 0.5, step_size_up=3),
    lambda o: schedules.CosineAnnealingWarmRestarts(o, 4),
    lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)], milestones=[7]),
    lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, total_iters=7), schedules.ExponentialLR(o, 0.9)]),
]


class TestOptimizers:
    def test_hyperparameters_and_state_come_back_whatever_the_new_one_has(self, ddl, tmp_path):
        model, optimizer, schedule, loader = prepare(ddl)
        train(ddl, model, loader)
        optimizer.param_groups[0]["weight_decay"] = 0.25
        ddl.save(tmp_path, model)
        other, second, again, _ = prepare(ddl, seed=4)
        ddl.load(tmp_path, other)
        groups = [{k: v for k, v in one.param_groups[0].items() if k != "params"} for one in (optimizer, second)]
        assert groups[0] == groups[1]
        assert again.state_dict() == schedule.state_dict()
        assert ddl._models.live()[-1].steps == 3

    @pytest.mark.parametrize("make", SCHEDULES, ids=lambda make: type(make(OPTIMIZER)).__name__)
    def test_every_kind_of_schedule_goes_on(self, ddl, tmp_path, make):
        def build():
            with ddl.model_init():
                model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return ddl.prepare(model, optimizer, make(optimizer))

        def rates(model, optimizer, steps):
            found = []
            for _ in range(steps):
                ddl.backward(model(SAMPLES).mean(), model=model)
                ddl.step(model=model)
                found.append(optimizer.param_groups[0]["lr"])
            return found

        model, optimizer, _ = build()
        rates(model, optimizer, 5)
        ddl.save(tmp_path, model)
        expected = rates(model, optimizer, 5)
        again, optimizer, _ = build()
        ddl.load(tmp_path, again)
        assert rates(again, optimizer, 5) == expected
        assert len(set(expected)) > 1

    def test_a_schedule_that_wants_a_metric_comes_back(self, ddl, tmp_path):
        def build():
            with ddl.model_init():
                model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return ddl.prepare(model, optimizer, schedule)

        model, optimizer, schedule = build()
        schedule.step(1.0)
        schedule.step(2.0)
        ddl.save(tmp_path, model)
        other, second, again = build()
        ddl.load(tmp_path, other)
        assert again.state_dict() == schedule.state_dict()
        assert second.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.1)

    def test_a_model_for_inference_takes_the_weights_alone(self, ddl, tmp_path):
        model, *_, loader = prepare(ddl)
        train(ddl, model, loader)
        ddl.save(tmp_path, model)
        alone = ddl.prepare(torch.nn.Sequential())  # another model beside
        from tests.checkpoint.small import Small

        reader = ddl.prepare(Small())
        loaded = ddl.load(tmp_path, reader)
        assert loaded.step == 3
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in reader.state_dict().items())
        assert alone is not reader


class TestResume:
    def test_latest_where_there_is_none_changes_nothing(self, ddl, tmp_path):
        model, *_ = prepare(ddl)
        before = model.state_dict()
        for path in (tmp_path, tmp_path / "none"):
            loaded = ddl.load(path, model, resume="latest")
            assert (loaded.folder, loaded.step, loaded.epoch, loaded.extra) == (None, 0, 0, {})
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not (tmp_path / "none").exists()

    def test_latest_is_the_newest_and_a_step_s_folder_is_that_step(self, ddl, tmp_path):
        model, *_, loader = prepare(ddl)
        for _ in range(2):
            train(ddl, model, loader)
            ddl.save(tmp_path, model)
        assert ddl.load(tmp_path, model, resume="latest").step == 6
        assert ddl.load(tmp_path / "step-3", model).step == 3
        assert ddl.load(str(tmp_path), model).step == 6

    def test_a_plain_folder_of_weights_is_loaded_too(self, ddl, tmp_path):
        from tests.strategies.models import llama

        torch.manual_seed(3)
        source = llama(tied=True)
        source.save_pretrained(tmp_path)
        with ddl.model_init():
            model = llama(tied=True)
        model, _ = ddl.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        loaded = ddl.load(tmp_path, model)
        assert loaded.step == 0
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in source.state_dict().items())
        assert any("holds weights and nothing else" in note for note in notes(ddl))

    def test_a_load_that_broke_off_is_healed_by_the_next_one_and_nothing_else_goes_on(self, ddl, tmp_path, monkeypatch):
        model, *_, loader = prepare(ddl)
        expected = train(ddl, model, loader)
        folder = ddl.save(tmp_path, model)
        expected = train(ddl, model, loader)
        other, *_, again = prepare(ddl, seed=4)
        loss = other(SAMPLES).mean()
        prepared = ddl.prepared_models()[-1].prepared
        put = prepared.put

        def stopped(items):
            put(items[: len(items) - 2])  # some of the optimizer's state is missing then
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(prepared, "put", stopped)
            with pytest.raises(KeyboardInterrupt):
                ddl.load(folder, other)
        uses = [
            lambda: other(SAMPLES),
            lambda: ddl.backward(loss, model=other),
            lambda: ddl.step(model=other),
            lambda: ddl.save(tmp_path, other),
        ]
        for use in uses:
            with pytest.raises(DDLError, match=r"A load of this Small broke off: .* Load again, or build it anew"):
                use()
        with pytest.raises(CheckpointError, match="no folder"):
            ddl.load(tmp_path / "none", other)
        with pytest.raises(DDLError, match="broke off"):
            ddl.step(model=other)
        ddl.load(folder, other)
        assert train(ddl, other, again, epochs=2) == expected

    def test_in_the_middle_of_a_step_is_refused(self, ddl, tmp_path):
        model, *_ = prepare(ddl)
        ddl.save(tmp_path, model)
        ddl.backward(model(SAMPLES).mean(), model=model)
        with pytest.raises(CheckpointError, match="in the middle of a step"):
            ddl.load(tmp_path, model)
        ddl.step(model=model)
