"""What a user may write after `--strategy`, and what is said to the rest. Needs neither torch nor ranks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import pytest

from ddl_magics.errors import SpecError
from ddl_magics.strategies import spec
from ddl_magics.strategies.base import Training
from ddl_magics.strategies.spec import StrategySpec
from ddl_magics.strategies.zero_config import build


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("single", "single"),
        ("ddp", "ddp"),
        ("ddp,find_unused_parameters=false", "ddp"),
        ("zero", "zero:2"),
        ("ZeRO:3", "zero:3"),
        ("zero,offload=cpu", "zero:2,offload=cpu"),
        ("zero:offload=cpu", "zero:2,offload=cpu"),
        ("zero:3, offload_param=cpu, offload=cpu", "zero:3,offload=cpu,offload_param=cpu"),
    ],
)
def test_one_strategy_has_one_spelling(text, canonical):
    parsed = spec.parse(text)
    assert parsed.text == canonical
    assert spec.parse(canonical) == parsed
    assert hash(spec.parse(canonical)) == hash(parsed)


def test_commas_separate_strategies_and_their_options():
    specs = spec.parse_many("single,ddp,zero:2,offload=cpu,zero:3,config=ds.json,offload=cpu")
    assert [parsed.text for parsed in specs] == [
        "single",
        "ddp",
        "zero:2,offload=cpu",
        "zero:3,config=ds.json,offload=cpu",
    ]
    assert specs[2].option("offload") == "cpu"
    assert specs[1].option("offload") is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ddpp", "'ddp'"),
        ("zerro:3", "'zero'"),
        ("xyz", "Valid: "),
        ("zero:4", "zero:1, zero:2, zero:3"),
        ("zero:2,ofload=cpu", "'offload'"),
        ("zero:2,offload=disk", "offload=cpu"),
        ("zero:2,offload_param=cpu", "zero:3,offload_param=cpu"),
        ("zero:2,offload=", "offload=VALUE"),
        ("zero:2,config=a,config=b", "twice"),
        ("ddp:3", "'ddp' alone"),
        ("single,fast=1", "takes no options"),
        ("offload=cpu,zero:2", "behind its strategy"),
        ("ddp,,zero", "single commas"),
        ("", "single commas"),
    ],
)
def test_a_mistake_is_one_line_with_a_remedy(text, told):
    with pytest.raises(SpecError) as raised:
        spec.parse_many(text)
    assert told in str(raised.value)
    assert raised.value.remedy
    assert "\n" not in str(raised.value)


def test_several_strategies_where_one_is_wanted_is_an_error():
    with pytest.raises(SpecError, match="names 2 strategies"):
        spec.parse("ddp,zero")


@pytest.mark.parametrize(
    ("strategy", "stage", "grid", "merged"),
    [
        (None, None, None, "ddp"),
        (None, 3, None, "zero:3"),
        ("zero", "1", None, "zero:1"),
        ("zero:3", 3, None, "zero:3"),
        ("zero,offload=cpu", 3, None, "zero:3,offload=cpu"),
        ("zero:offload=cpu", 1, None, "zero:1,offload=cpu"),
        ("single,ddp,zero", 1, None, "single,ddp,zero:1"),
    ],
)
def test_stage_is_another_spelling(strategy, stage, grid, merged):
    assert spec.merge(strategy, stage, grid) == merged


@pytest.mark.parametrize(
    ("strategy", "stage", "grid", "told"),
    [
        ("ddp", 3, None, "zero:3"),
        ("zero:2", 3, None, "contradicts"),
        ("zero", 4, None, "no stage '4'"),
        ("ddp", None, (2, 1, 1), "axonn:2x1x1"),
        (None, 3, (2, 1, 1), "--strategy axonn:2x1x1"),
    ],
)
def test_stage_and_grid_that_fit_no_strategy_are_errors(strategy, stage, grid, told):
    with pytest.raises(SpecError) as raised:
        spec.merge(strategy, stage, grid)
    assert told in str(raised.value)


def test_grid_is_another_spelling():
    pytest.importorskip("axonn")
    assert spec.merge(None, None, ("2", "1", "1")) == "axonn:2x1x1"
    assert spec.merge("ddp,axonn", None, (1, 2, 1)) == "ddp,axonn:1x2x1"


def test_a_grid_that_does_not_divide_the_world_shows_every_factor():
    with pytest.raises(SpecError) as raised:
        spec.divide_world("axonn:2x3x1", {"row": 2, "column": 3, "depth": 1}, 4)
    assert "row 2 x column 3 x depth 1 = 6" in str(raised.value)
    assert "1 or 2 or 4" in raised.value.remedy
    assert "-n 6" in raised.value.remedy
    assert spec.divide_world("axonn:2x1x1", {"row": 2, "column": 1, "depth": 1}, 4) == 2


def test_a_missing_extra_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SpecError) as raised:
        spec.check(spec.parse("zero:2"), 2, 2)
    assert "pip install 'ddl-magics[deepspeed]'" in str(raised.value)


def test_shares_are_those_of_the_paper():
    assert spec.shares(spec.parse("ddp"), 4) == {"parameters": 1, "gradients": 1, "optimizer": 1}
    assert spec.shares(spec.parse("zero:1"), 4) == {"parameters": 1, "gradients": 1, "optimizer": 0.25}
    assert spec.shares(spec.parse("zero:2"), 4) == {"parameters": 1, "gradients": 0.25, "optimizer": 0.25}
    assert spec.shares(spec.parse("zero:3"), 4) == {"parameters": 0.25, "gradients": 0.25, "optimizer": 0.25}


THIRD_PARTY = """
from ddl_magics.strategies.base import Strategy
from ddl_magics.strategies.spec import StrategySpec, known_options

class Gossip(Strategy):
    name = "gossip"

    @classmethod
    def parse(cls, argument, options):
        known_options(cls.name, options, {"peers": ()})
        return StrategySpec(cls.name, argument or "ring", tuple(sorted(options.items())))

    def model_init(self): ...
    def prepare(self, model, optimizer, training): ...
"""


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """A strategy that another distribution brings, as pip would install it."""
    (tmp_path / "gossip.py").write_text(THIRD_PARTY)
    info = tmp_path / "gossip-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gossip\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ddl_magics.strategies]\ngossip = gossip:Gossip\nbroken = gossip_is_not_there:Gossip\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec._entry_points.cache_clear()
    yield
    spec._entry_points.cache_clear()


@pytest.mark.usefixtures("third_party")
def test_a_third_party_adds_a_strategy_with_its_options():
    assert "gossip" in spec.names()
    assert spec.merge("ddp,gossip,peers=2") == "ddp,gossip:ring,peers=2"
    with pytest.raises(SpecError, match="no option 'pears'"):
        spec.parse("gossip,pears=2")
    with pytest.raises(SpecError, match="gossip_is_not_there"):
        spec.parse("broken")


def test_checking_every_strategy_imports_neither_torch_nor_its_library():
    code = (
        "import sys\n"
        "from ddl_magics.strategies import spec\n"
        "for parsed in spec.parse_many('single,ddp,zero:3,offload=cpu'):\n"
        "    spec.check(parsed, 2, 2)\n"
        "    spec.shares(parsed, 2)\n"
        "assert not {'torch', 'deepspeed', 'axonn'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def written(tmp_path, config):
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"optimizer": {"type": "Adam"}}, "give it to ddl.prepare"),
        ({"scheduler": {"type": "WarmupLR"}}, "over the optimizer"),
        ({"fp16": {"enabled": True}}, "--precision"),
        ({"train_batch_size": 32}, "global batch"),
        ({"zero_optimization": {"stage": 3}}, "zero:3,config="),
        ("{'stage': 3}", "no JSON"),
        ("[1]", "not an object"),
    ],
)
def test_a_configuration_that_contradicts_the_cell_is_refused_before_any_rank_works(tmp_path, config, told):
    path = written(tmp_path, config)
    with pytest.raises(SpecError) as raised:
        spec.check(spec.parse(f"zero:2,config={path}"), 2, 2)
    assert told in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_configuration_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        spec.check(spec.parse(f"zero:2,config={tmp_path}/none.json"), 2, 2)


def test_a_configuration_is_merged_and_auto_means_absent(tmp_path):
    path = written(
        tmp_path,
        {
            "train_batch_size": "auto",
            "fp16": {"enabled": False},
            "gradient_accumulation_steps": 4,
            "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "round_robin_gradients": True},
        },
    )
    parsed = spec.check(spec.parse(f"zero:1,config={path}"), 2, 2)
    config = build(parsed, Training(accumulate=4), numel=1000, world_size=2, cuda=False)
    assert config["zero_optimization"]["stage"] == 1
    assert config["zero_optimization"]["round_robin_gradients"] is True
    assert config["zero_optimization"]["reduce_bucket_size"] == 125
    assert "train_batch_size" not in config
    with pytest.raises(SpecError, match="accumulates 4 steps"):
        build(parsed, Training(accumulate=2), numel=1000, world_size=2, cuda=False)


@pytest.mark.parametrize(("precision", "bf16", "autocast"), [("32", 0, 0), ("bf16-true", 1, 1), ("bf16-mixed", 0, 1)])
def test_the_precision_of_the_cell_decides_that_of_deepspeed(precision, bf16, autocast, tmp_path):
    plain = StrategySpec("zero", "2")
    config = build(plain, Training(precision), numel=1000, world_size=2, cuda=False)
    assert config["bf16"]["enabled"] == bf16
    assert config["torch_autocast"]["enabled"] == autocast
    path = written(tmp_path, {"bf16": {"enabled": not bf16}})
    with pytest.raises(SpecError, match=r"and the precision of the cell is"):
        build(spec.parse(f"zero:2,config={path}"), Training(precision), numel=1000, world_size=2, cuda=False)


def test_our_own_strategies_are_entry_points():
    own = {point.name for point in importlib.metadata.entry_points(group=spec.GROUP) if "ddl_magics" in point.value}
    assert own >= {"single", "ddp", "zero", "axonn"}
