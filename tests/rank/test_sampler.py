"""When the sampler's thread sends a record."""

from __future__ import annotations

import queue
import time

import pytest

from ddl_magics.protocol import CellRequest, World
from ddl_magics.rank import sampler
from ddl_magics.rank.context import Context
from ddl_magics.rank.rescue import Rescue
from ddl_magics.rank.sampler import Sampler
from ddl_magics.rank.whereabouts import Whereabouts

pytestmark = pytest.mark.timeout(60)


def request(run: str) -> CellRequest:
    return CellRequest(code="", cell=1, run=run, name=run)


def test_a_cell_that_begins_soon_after_another_has_a_whole_period_before_its_first_record(monkeypatch):
    monkeypatch.setattr(sampler, "PERIOD", 0.4)
    records: queue.Queue = queue.Queue()
    whereabouts = Whereabouts(lambda _: False)
    ranks_sampler = Sampler(
        Context(World(0, 1, 0, 1)),
        lambda _, content: records.put((time.monotonic(), content)),
        whereabouts,
        Rescue(whereabouts),
    )
    ranks_sampler.begin(request("first"))
    records.get(timeout=10)  # the thread has just begun its next wait
    ranks_sampler.end()
    began = time.monotonic()
    ranks_sampler.begin(request("second"))
    at, record = records.get(timeout=10)
    ranks_sampler.end()
    assert record["run"] == "second"
    assert at - began >= 0.4
