"""What is in the folder of a checkpoint, and that other programs read it."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ddl_magics.rank.checkpoint import shares, states, tensors
from ddl_magics.strategies.base import Entry
from tests.checkpoint.small import Small, prepare, train
from tests.strategies.models import llama

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def saved(ddl, tmp_path):
    model, optimizer, _, loader = prepare(ddl)
    train(ddl, model, loader)
    return ddl.save(tmp_path / "run", best=0.5), model, optimizer


def test_the_folder_holds_one_step_and_latest_names_it(saved):
    folder, _, _ = saved
    assert folder.name == "step-3"
    assert (folder.parent / "latest").read_text() == "step-3\n"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["latest", "step-3"]
    assert sorted(path.name for path in folder.iterdir()) == ["ddl.json", "model.safetensors", "optimizer"]


def test_weights_are_read_by_the_plain_library(saved):
    folder, model, _ = saved
    weights = load_file(folder / "model.safetensors")
    own = model.state_dict()
    assert weights.keys() == own.keys()
    assert all(torch.equal(weights[name], own[name]) and weights[name].dtype == own[name].dtype for name in own)
    plain = Small()
    plain.load_state_dict(weights)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_optimizer_is_read_by_the_plain_library(saved, ddl):
    folder, model, optimizer = saved
    reader = dcp.FileSystemReader(folder / "optimizer")
    about = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in about.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    momenta = {
        f"{name}/momentum_buffer": optimizer.state[parameter]["momentum_buffer"]
        for name, parameter in ddl.unwrap(model).named_parameters()
    }
    assert state.keys() == momenta.keys()
    assert all(torch.equal(state[key], momenta[key]) for key in momenta)


def test_the_rest_is_json_in_plain_words(saved):
    folder, _, optimizer = saved
    record = json.loads((folder / "ddl.json").read_text())
    assert (record["step"], record["strategy"], record["world_size"], record["model"]) == (3, "single", 1, "Small")
    assert record["extra"] == {"best": 0.5}
    assert record["optimizer"]["groups"][0]["lr"] == optimizer.param_groups[0]["lr"] == 0.05
    assert record["optimizer"]["names"][0][:2] == ["first.weight", "first.bias"]
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(record["files"]) == written - {"ddl.json"}


@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_model_is_read_back_by_from_pretrained(ddl, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    with ddl.model_init(5):
        model = llama(tied=tied)
    model.generation_config.max_new_tokens = 7
    model = ddl.prepare(model)
    folder = ddl.save(tmp_path, tokenizer=Tokenizer())
    read = AutoModelForCausalLM.from_pretrained(folder)
    own = model.state_dict()
    assert read.state_dict().keys() == own.keys()
    assert all(torch.equal(value, own[name]) for name, value in read.state_dict().items())
    assert read.config.tie_word_embeddings is tied
    assert read.generation_config.max_new_tokens == 7
    assert (folder / "tokenizer.json").read_text() == "{}"


class Tokenizer:
    """Saves itself as those of transformers do."""

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


class TestWeightFiles:
    def test_few_bytes_are_one_file_and_many_are_a_file_for_each_rank(self):
        small = [Entry(f"w{i}", "weight", (2**20,), torch.float32) for i in range(3)]
        assert [file.name for file in shares.weight_files(small, 8)] == ["model.safetensors"]
        large = [Entry(f"w{i}", "weight", (2**20, 4), torch.float32) for i in range(8)]
        files = shares.weight_files(large, 2)
        assert [(file.name, file.rank) for file in files] == [
            ("model-00001-of-00002.safetensors", 0),
            ("model-00002-of-00002.safetensors", 1),
        ]
        assert sum(len(file.entries) for file in files) == 8
        assert [sum(map(shares.nbytes, file.entries)) for file in files] == [4 * 2**24] * 2

    def test_no_file_is_larger_than_the_hub_takes(self):
        huge = [Entry(f"w{i}", "weight", (2**30,), torch.float32) for i in range(4)]
        files = shares.weight_files(huge, 1)
        assert len(files) == 4
        assert {file.rank for file in files} == {0}

    @pytest.mark.parametrize("dtype", list(tensors.DTYPES), ids=str)
    def test_every_dtype_comes_back_from_the_plain_library(self, tmp_path, dtype):
        numbers = torch.arange(6).reshape(2, 3)
        given = {"x": numbers.to(dtype), "scalar": torch.tensor(1).to(dtype), "none": torch.empty(0, 2, dtype=dtype)}
        entries = [Entry(name, "weight", tuple(value.shape), dtype) for name, value in given.items()]
        draft = tensors.WeightsDraft(tmp_path / "model.safetensors", entries)
        for entry in draft.entries:
            draft.add(entry, given[entry.name])
        draft.finish()
        read = load_file(tmp_path / "model.safetensors")
        sliced = tensors.read_folder(tmp_path)
        assert all(read[name].dtype == dtype and torch.equal(read[name], given[name]) for name in given)
        assert torch.equal(sliced["x"][1:, :2], given["x"][1:, :2])
        assert torch.equal(sliced["scalar"][...], given["scalar"])

    def test_wide_dtypes_come_first_so_that_each_tensor_is_aligned(self):
        entries = [Entry(n, "weight", (3,), d) for n, d in (("a", torch.bool), ("b", torch.float64), ("c", torch.half))]
        assert [entry.name for entry in tensors.in_order(entries)] == ["b", "c", "a"]
        assert len(tensors.header(entries)) % 8 == 0


class TestStates:
    def test_a_part_is_read_without_the_rest(self, tmp_path):
        given = {
            Entry("a.b", "exp_avg", (4, 5), torch.float32): torch.randn(4, 5),
            Entry("a.b", "step", (), torch.float32): torch.tensor(7.0),
            Entry("c", "exp_avg", (0,), torch.bfloat16): torch.empty(0, dtype=torch.bfloat16),
            Entry("d", "exp_avg", (300, 100), torch.float32): torch.randn(300, 100),  # written by itself
        }
        draft = states.StatesDraft(tmp_path / states.file_name(0))
        for entry, tensor in given.items():
            draft.add(entry, tensor)
        draft.finish()
        read = dict(states.read_folder(tmp_path, json.loads(json.dumps(states.to_plain(draft.places)))))
        assert read.keys() == given.keys()
        for entry, tensor in given.items():
            assert torch.equal(read[entry][...], tensor)
        matrix = next(iter(given))
        part = read[matrix][1:3, 2:]
        assert torch.equal(part, given[matrix][1:3, 2:])
