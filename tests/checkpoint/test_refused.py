"""What cannot be saved or loaded is one line, and changes nothing."""

from __future__ import annotations

import json
import os
from collections import Counter

import numpy as np
import pytest
import torch

from ddl_magics.errors import CheckpointError, DDLError
from ddl_magics.rank.checkpoint import layout, plain
from tests.checkpoint.small import SAMPLES, Small, prepare, train
from tests.one_rank import begin

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def saved(rank, tmp_path_factory):
    """A checkpoint of three steps; its tests put back what they change."""
    begin(rank)
    model, *_, loader = prepare(rank)
    train(rank, model, loader)
    return rank.save(tmp_path_factory.mktemp("saved"))


def refused(ddl, model, path, match, **options):
    """The load raises and leaves model and loader as they were."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=match) as raised:
        ddl.load(path, model, **options)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    return str(raised.value)


class TestAnotherModel:
    def build(self, ddl, module):
        return ddl.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))[0]

    def test_names_and_shapes_that_differ_are_told(self, ddl, saved):
        other = Small(width=5)
        other.last, other.head, other.tail = torch.nn.Identity(), torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        said = refused(ddl, self.build(ddl, other), saved, "is of another model than this Small")
        assert "4 missing in it (head.weight, head.bias, tail.weight, ...)" in said
        assert "2 unknown here (last.bias, last.weight)" in said or "2 unknown here (last.weight, last.bias)" in said
        assert "1 of another shape (first.weight (4, 3), here (4, 5))" in said

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda m: torch.optim.AdamW(m.parameters()), "has the state of SGD, and this optimizer is AdamW"),
            (
                lambda m: torch.optim.SGD([{"params": m.first.parameters()}, {"params": m.last.parameters()}], lr=1),
                "has 1 groups of parameters, and this one 2",
            ),
            (lambda m: torch.optim.SGD(m.first.parameters(), lr=1), "Group 0 of the SGD is another"),
        ],
    )
    def test_another_optimizer(self, ddl, saved, make, said):
        module = Small()
        model, _ = ddl.prepare(module, make(module))
        refused(ddl, model, saved, said)

    def test_other_schedules(self, ddl, saved):
        refused(ddl, self.build(ddl, Small()), saved, "has the schedules StepLR, and ddl.prepare was given none")


class TestDamage:
    @pytest.fixture
    def damaged(self, ddl, tmp_path):
        model, *_, loader = prepare(ddl)
        train(ddl, model, loader)
        return ddl.save(tmp_path, model), model

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer/__0_0.distcp", "optimizer/.metadata"])
    def test_one_byte_is_noticed_and_its_file_named(self, ddl, damaged, name):
        folder, model = damaged
        with (folder / name).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        refused(ddl, model, folder, f"{name} is not as it was written")

    def test_a_file_that_is_cut_or_gone_is_named(self, ddl, damaged):
        folder, model = damaged
        os.truncate(folder / "model.safetensors", 100)
        refused(ddl, model, folder, "model.safetensors has 100 bytes and was written with")
        (folder / "model.safetensors").unlink()
        refused(ddl, model, folder, "model.safetensors is missing")

    @pytest.mark.parametrize("change", [lambda text: text[:-9], lambda text: text.replace('"step": 3', '"step": 4')])
    def test_a_changed_record_is_noticed(self, ddl, damaged, change):
        folder, model = damaged
        (folder / "ddl.json").write_text(change((folder / "ddl.json").read_text()))
        refused(ddl, model, folder, "ddl.json is damaged")

    def test_a_later_format_says_to_update(self, ddl, damaged):
        folder, model = damaged
        record = json.loads((folder / "ddl.json").read_text()) | {"format": 99}
        del record["sha256"]
        (folder / "ddl.json").write_text(json.dumps(layout.seal(record)))
        refused(ddl, model, folder, "has format 99, and this version reads 1. Update ddl-magics")


class TestWords:
    def test_a_folder_that_is_not_there_or_holds_no_checkpoint(self, ddl, tmp_path):
        model, *_ = prepare(ddl)
        refused(ddl, model, tmp_path / "none", "There is no folder")
        refused(ddl, model, tmp_path, "holds no checkpoint. Give the folder that ddl.save was given")
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        refused(ddl, model, tmp_path, "holds no checkpoint and no safetensors")
        (tmp_path / "model.safetensors").write_bytes(b"no")
        refused(ddl, model, tmp_path, "model.safetensors cannot be read")

    def test_words_that_are_none(self, ddl, saved):
        model, *_ = prepare(ddl)
        refused(ddl, model, saved, "no resume='newest'. Valid: 'latest'", resume="newest")
        refused(ddl, model, 7, r"load\(path\) takes a folder, got a int")
        with pytest.raises(CheckpointError, match=r"save\(path\) takes a folder, got a NoneType"):
            ddl.save(None, model)
        for keep in (0, True, 1.5):
            with pytest.raises(CheckpointError, match="keep="):
                ddl.save(saved.parent, model, keep=keep)
        with pytest.raises(DDLError, match=r"save\(model=...\) was given a Small"):
            ddl.save(saved.parent, Small())

    def test_without_a_model(self, ddl, tmp_path):
        with pytest.raises(DDLError, match="save was called and no model is prepared"):
            ddl.save(tmp_path)

    def test_a_folder_of_the_user_s_is_not_replaced(self, ddl, tmp_path):
        model, *_ = prepare(ddl)
        (tmp_path / "step-0").mkdir()
        (tmp_path / "step-0" / "mine").write_text("")
        with pytest.raises(CheckpointError, match="step-0 is there and is no checkpoint"):
            ddl.save(tmp_path, model)
        assert [path.name for path in tmp_path.rglob("*")] == ["step-0", "mine"]

    def test_a_file_in_the_way(self, ddl, tmp_path):
        model, *_ = prepare(ddl)
        (tmp_path / "run").write_text("")
        with pytest.raises(CheckpointError, match=r"Rank 0: File exists \(.*run\)"):
            ddl.save(tmp_path / "run", model)

    def test_values_that_a_checkpoint_cannot_hold(self, ddl, tmp_path):
        model, *_ = prepare(ddl)
        with pytest.raises(CheckpointError, match=r"settings\['loss'\]\[1\] is a function, which a checkpoint cannot"):
            ddl.save(tmp_path, model, settings={"loss": [1, prepare]})
        assert list(tmp_path.iterdir()) == []

    def test_a_model_whose_last_update_broke_off(self, ddl, tmp_path):
        model, optimizer, *_ = prepare(ddl)

        def fail(*_):
            raise RuntimeError

        hook = optimizer.register_step_pre_hook(fail)
        ddl.backward(model(SAMPLES).mean(), model=model)
        with pytest.raises(RuntimeError):
            ddl.step(model=model)
        with pytest.raises(CheckpointError, match="The last update of Small broke off"):
            ddl.save(tmp_path, model)
        hook.remove()
        ddl._models.live()[-1].rebind()


VALUES = [
    None,
    True,
    3,
    "text",
    [1, [2.5]],
    {"a": {"b": (1, (2, "x"))}},
    {1: "one", (2, 3): None},
    Counter({30: 2, 80: 1}),
    float("inf"),
    -float("inf"),
    {"(tuple)": [1]},
    {},
    (),
]


class TestPlain:
    @pytest.mark.parametrize("value", VALUES, ids=repr)
    def test_values_come_back_as_they_were(self, value):
        back = plain.decode(json.loads(json.dumps(plain.encode(value, "x"), allow_nan=False)))
        assert back == value
        assert type(back) is type(value)

    def test_numbers_that_json_lacks_and_numpy_s(self):
        assert np.isnan(plain.decode(plain.encode(float("nan"), "x")))
        assert plain.decode(plain.encode(np.float32(0.5), "x")) == 0.5

    @pytest.mark.parametrize(
        "value",
        [torch.tensor(3e-4), torch.arange(6).reshape(2, 3), torch.ones(2, dtype=torch.bfloat16), torch.empty(0)],
    )
    def test_tensors_come_back_with_shape_and_dtype(self, value):
        back = plain.decode(json.loads(json.dumps(plain.encode(value, "x"))))
        assert torch.equal(back, value)
        assert back.dtype == value.dtype
