"""What frees a rank: which errors come of a closed connection, and NCCL's abort."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
import torch.distributed as dist

from ddl_magics.protocol import World
from ddl_magics.rank import collectives, group, pairs, rescue
from ddl_magics.rank.rescue import Rescue, closed_connection
from ddl_magics.rank.whereabouts import Whereabouts

pytestmark = pytest.mark.timeout(60)

CLOSED = "[/torch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def raised(*errors: BaseException) -> BaseException:
    """The last of the errors, each raised from the one before."""
    for cause, error in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[-1]


@pytest.mark.parametrize(
    ("error", "closed"),
    [
        (RuntimeError(CLOSED), True),
        (raised(RuntimeError(CLOSED), OSError("training failed")), True),
        (dist.DistNetworkError("Failed to recv, got 0 bytes."), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv"), False),
        (ValueError(CLOSED), False),
        (None, False),
    ],
)
def test_an_error_tells_whether_it_comes_of_a_closed_connection(error, closed):
    assert (closed_connection(error) is not None) is closed


def test_a_request_to_free_a_cell_that_has_ended_does_nothing():
    freed = Rescue(Whereabouts(lambda _: False))
    freed.begin("one")
    freed.end()
    assert freed.release("too late", run="one") == {"shut": 0, "aborted": False}
    assert not freed.broken


def test_a_cell_does_not_end_while_its_connections_are_being_closed(monkeypatch):
    shutting, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def shut():
        shutting.set()
        assert go_on.wait(20)
        return 3

    monkeypatch.setattr(pairs, "shut", shut)
    freed = Rescue(Whereabouts(lambda _: False))
    freed.begin("one")
    answers = []
    asked = threading.Thread(target=lambda: answers.append(freed.release("stopped", run="one")))
    asked.start()
    assert shutting.wait(20)
    main = threading.Thread(target=lambda: (freed.end(), ended.set()))
    main.start()
    assert not ended.wait(0.3)
    go_on.set()
    for thread in (asked, main):
        thread.join(20)
    assert ended.is_set()
    assert (answers, freed.broken) == ([{"shut": 3, "aborted": False}], True)


def test_without_groups_nothing_is_shut():
    assert pairs.shut() == 0
    assert collectives.under_way() is None


@pytest.mark.gpu
def test_nccl_is_aborted_within_its_time_limit():
    """On one GPU a group of one: that abort works while a kernel runs can only be seen with several."""
    with_gpu = World(0, 1, 0, 1, device="cuda:0")
    group.open_group(with_gpu, group.serve())
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))
        done = threading.Event()
        threading.Thread(target=lambda: (rescue.abort_nccl(), done.set()), daemon=True).start()
        assert done.wait(rescue.ABORT_S + 5)
    finally:
        group.close_group()
