"""The words of `axonn` in the notebook: grids, options, shares, and what a grid that does not fit is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ddl_magics.errors import SpecError
from ddl_magics.protocol import World
from ddl_magics.strategies import spec
from ddl_magics.strategies.axonn.grid import Grid

pytest.importorskip("axonn")


@pytest.mark.parametrize(
    ("typed", "canonical"),
    [
        ("axonn", "axonn"),
        ("axonn:2x1x1", "axonn:2x1x1"),
        ("axonn:2X1X1", "axonn:2x1x1"),
        ("axonn:02x1x1", "axonn:2x1x1"),
        ("axonn:2x1x1,overlap=0", "axonn:2x1x1"),
        ("axonn:2x1x1,overlap=1", "axonn:2x1x1,overlap=1"),
        ("axonn:overlap=1", "axonn,overlap=1"),
    ],
)
def test_a_grid_has_one_spelling(typed, canonical):
    assert spec.parse(typed).text == canonical


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("axonn:2x1", "three factors"),
        ("axonn:2x0x1", "three factors"),
        ("axonn:2x-1x1", "three factors"),
        ("axonn:four", "Write axonn:RxCxD"),
        ("axonn:2x1x1,overlap=yes", "overlap=0, overlap=1"),
        ("axonn:2x1x1,overlaps=1", "Did you mean 'overlap'?"),
    ],
)
def test_what_is_no_grid_or_option_is_told_the_valid_form(typed, told):
    with pytest.raises(SpecError) as raised:
        spec.parse(typed)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("world_size", "local_world_size", "grid"),
    [
        (1, 1, "1x1x1"),
        (2, 2, "2x1x1"),
        (4, 4, "2x2x1"),
        (8, 8, "4x2x1"),
        (6, 6, "3x2x1"),
        (8, 4, "2x2x1"),  # two nodes: data parallel between them
        (16, 1, "1x1x1"),
        (6, 4, "2x1x1"),  # nodes of 4 and 2 ranks: a grid of what divides the world
    ],
)
def test_bare_axonn_is_one_node_as_square_as_it_divides(world_size, local_world_size, grid):
    assert spec.check(spec.parse("axonn"), world_size, local_world_size).text == f"axonn:{grid}"


def test_a_grid_that_does_not_divide_the_world_shows_every_factor_and_the_nearest_that_do():
    with pytest.raises(SpecError) as raised:
        spec.check(spec.parse("axonn:3x1x1"), 4, 4)
    assert raised.value.message == ("axonn:3x1x1: row 3 x column 1 x depth 1 = 3 ranks does not divide the world of 4")
    assert raised.value.remedy.startswith("Nearest that do: axonn:4x1x1 or axonn:2x1x1")
    with pytest.raises(SpecError) as raised:
        spec.check(spec.parse("axonn:2x2x2"), 4, 4)
    for near in ("axonn:2x2x1", "axonn:2x1x2", "axonn:1x2x2"):
        assert near in raised.value.remedy


@pytest.mark.parametrize("world_size", [1, 2, 6, 8, 12])
def test_nearest_grids_divide_the_world(world_size):
    nearest = Grid(5, 3, 2).nearest(world_size)
    assert nearest
    for grid in nearest:
        grid.check(world_size)


def test_shares_are_one_over_the_grid():
    assert spec.shares(spec.parse("axonn:2x1x1"), 4) == {"parameters": 0.5, "gradients": 0.5, "optimizer": 0.5}
    assert spec.shares(spec.parse("axonn:2x2x2"), 8)["parameters"] == 1 / 8
    assert spec.shares(spec.parse("axonn"), 4)["optimizer"] == 1 / 4


def test_every_rank_has_its_own_slice_of_the_batch():
    strategies = [spec.load(spec.parse("axonn:2x1x1"), World(rank, 4, rank, 4)) for rank in range(4)]
    assert [strategy.data_rank for strategy in strategies] == [0, 1, 2, 3]
    assert {strategy.data_size for strategy in strategies} == {4}


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(SpecError) as raised:
        spec.check(spec.parse("axonn:2x1x1"), 2, 2)
    assert "pip install 'ddl-magics[axonn]'" in str(raised.value)


def test_the_words_need_no_torch():
    code = (
        "import sys\n"
        "from ddl_magics.strategies import spec\n"
        "spec.shares(spec.check(spec.parse('axonn'), 4, 4), 4)\n"
        "assert not {'torch', 'axonn', 'mpi4py'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
