"""The folder of a run: which checkpoint is the latest, what `keep` removes, and what is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ddl_magics.lease import Process
from ddl_magics.rank.checkpoint import files, layout
from tests.checkpoint.small import prepare, train

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run(tmp_path):
    return layout.Run(tmp_path)


def make(run, step, saved):
    folder = run.checkpoint(step)
    folder.mkdir()
    (folder / "ddl.json").write_text(json.dumps({"saved": saved}))
    return folder


class TestLatest:
    def test_is_what_the_file_names(self, run):
        first, _ = make(run, 1, saved=1.0), make(run, 2, saved=2.0)
        (run.path / "latest").write_text("step-1\n")
        assert run.latest() == first

    @pytest.mark.parametrize("told", [None, "step-9\n", "", "../elsewhere\n"])
    def test_is_the_last_saved_where_the_file_tells_nothing_true(self, run, told):
        make(run, 30, saved=1.0)
        newest = make(run, 4, saved=2.0)
        run.checkpoint(50).mkdir()  # without a record it is none
        if told is not None:
            (run.path / "latest").write_text(told)
        assert run.latest() == newest

    def test_is_none_where_there_is_none(self, run):
        assert run.latest() is None
        assert layout.Run(run.path / "none").latest() is None

    def test_is_the_one_aside_when_a_replacement_stopped_in_between(self, run):
        aside = run.hidden("step-1", "replaced")
        files.rename(make(run, 1, saved=1.0), aside)
        (run.path / "latest").write_text("step-1\n")
        assert run.latest() == aside
        run.clean()
        assert [path.name for path in run.path.iterdir() if path.name != "latest"] == ["step-1"]


class TestKeep:
    def test_leaves_the_newest_by_the_time_of_saving_and_all_else(self, ddl, tmp_path):
        model, *_, loader = prepare(ddl)
        others = ["step-x", "notes.txt", "step-1.bak"]
        for name in others:
            (tmp_path / name).write_text("mine")
        (tmp_path / "step-900").mkdir()  # not ours: no record
        for _ in range(4):
            train(ddl, model, loader)
            ddl.save(tmp_path, model, keep=2)
        ddl.load(tmp_path / "step-9", model)  # back, and step 12 once more
        train(ddl, model, loader, epochs=4)
        ddl.save(tmp_path, model, keep=2)
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == sorted([*others, "step-900", "latest", "step-9", "step-12"])

    def test_the_one_just_saved_is_kept_whatever_its_step(self, ddl, tmp_path):
        model, *_, loader = prepare(ddl)
        first = ddl.save(tmp_path / "a", model)
        train(ddl, model, loader)
        ddl.save(tmp_path, model)
        ddl.load(first, model)
        folder = ddl.save(tmp_path, model, keep=1)
        assert folder.name == "step-0"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest", "step-0"]


class TestLeftovers:
    def hidden(self, run, pid, created, host=None, doing="saving"):
        folder = run.path / f".step-5.{doing}.{host or layout.host()}.{pid}.{created:.0f}"
        folder.mkdir()
        (folder / "part").write_text("x")
        return folder

    def test_of_a_dead_process_go_and_those_of_a_live_one_stay(self, run):
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            created = Process.of(process.pid).created
            alive = self.hidden(run, process.pid, created)
            reused = self.hidden(run, process.pid, created - 100)
            mine = self.hidden(run, os.getpid(), Process.of(os.getpid()).created, doing="removing")
            others = [run.path / ".step-5", run.path / ".hidden", run.path / ".step-5.saving"]
            for path in others:
                path.mkdir()
            run.clean()
            assert [path.exists() for path in (alive, reused, mine)] == [True, False, False]
            assert all(path.exists() for path in others)
            process.kill()
            process.wait()
        run.clean()
        assert not alive.exists()

    def test_of_another_host_go_when_nothing_changed_for_an_hour(self, run):
        fresh, old = (self.hidden(run, number, 1.0, host="elsewhere") for number in (1, 2))
        for path in (old / "part", old):
            os.utime(path, (time.time() - 2 * layout.SILENT_S,) * 2)
        run.clean()
        assert (fresh.exists(), old.exists()) == (True, False)


def test_an_interrupted_save_leaves_nothing_and_the_next_one_works(ddl, tmp_path, monkeypatch):
    model, *_, loader = prepare(ddl)
    train(ddl, model, loader)
    prepared = ddl.prepared_models()[-1].prepared
    gather, calls = prepared.gather, []

    def stopped(entry, to):
        calls.append(entry)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return gather(entry, to)

    with monkeypatch.context() as patch:
        patch.setattr(prepared, "gather", stopped)
        with pytest.raises(KeyboardInterrupt):
            ddl.save(tmp_path, model)
    assert list(tmp_path.iterdir()) == []
    assert ddl.save(tmp_path, model).name == "step-3"


def test_a_stop_in_the_middle_of_a_tensor_is_a_stop_and_the_next_save_works(ddl, tmp_path, monkeypatch):
    model, *_, loader = prepare(ddl)
    train(ddl, model, loader)
    ddl.save(tmp_path, model)
    train(ddl, model, loader)
    write = files.Draft.write
    for name in ("model.safetensors", "__0_0.distcp"):
        stops = []

        def stopped(draft, data, name=name, stops=stops):
            count = write(draft, data)
            if draft.path.name == name and not stops:
                stops.append(name)
                signal.raise_signal(signal.SIGINT)
            return count

        with monkeypatch.context() as patch:
            patch.setattr(files.Draft, "write", stopped)
            with pytest.raises(KeyboardInterrupt):
                ddl.save(tmp_path, model)
        assert stops == [name]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ddl.save(tmp_path, model).name == "step-6"
    assert ddl.load(tmp_path, model).step == 6


def test_two_folders_change_places_in_one_moment(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    if not files.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot")
    assert [(tmp_path / name).joinpath(other).exists() for name, other in (("a", "b"), ("b", "a"))] == [True, True]
    with pytest.raises(OSError, match="No such file"):
        files.exchange(tmp_path / "a", tmp_path / "none")
