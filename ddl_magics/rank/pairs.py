"""The connections of gloo between ranks, which can be shut from any thread to free a rank that waits in a collective.

Neither `abort` nor `destroy_process_group` on another thread frees it; shutting the connected sockets does, at once and
on both sides, also where DataLoader workers hold copies of them. They are told from all other sockets of the process
(ZMQ's, the store's, the user's own) by endpoints: each rank notes on which ports its groups listen when it makes them,
and tells the others by the store. The listening sockets themselves stay: gloo aborts the process when one is shut.
Limits: groups over TCP only; a group that was made before `watch` is not seen.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store

Endpoint = tuple[str, int]

KEY = "ddl/listening"

_make_group = c10d._new_process_group_helper
_listening: set[Endpoint] = set()
_known: set[Endpoint] = set()
_store: Store | None = None
_rank = 0
_world_size = 1


def watch(store: Store, rank: int, world_size: int) -> None:
    """Note the endpoints of every group that is made from now on. `store`: a connection of our own to the ranks'."""
    global _store, _rank, _world_size
    _store, _rank, _world_size = store, rank, world_size
    c10d._new_process_group_helper = _make_and_note


def shut() -> int:
    """Shut every connection of this rank's groups, from any thread; returns how many.

    Collectives under way here and on the peers raise RuntimeError, and so does any later one: the groups must be made
    anew.
    """
    theirs = _peers()
    return _shut_where(lambda here, there: here in _listening or there in theirs)


def shut_connections_to(host: str, port: int) -> int:
    """Shut this process's connections to a server, from any thread; returns how many."""
    return _shut_where(lambda _, there: there == (host, port))


def _shut_where(wanted: Callable[[Endpoint, Endpoint], bool]) -> int:
    count = 0
    for fd, here, there in _sockets():
        if there is None or not wanted(here, there):
            continue
        # The peer may be faster, and gloo may have closed it meanwhile.
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if _endpoint(copy.getpeername()) == there:
                copy.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _make_and_note(*args: Any, **kwargs: Any) -> Any:
    before = _listens_on()
    try:
        return _make_group(*args, **kwargs)
    finally:
        now = _listens_on()
        _listening.intersection_update(now)  # others may get the ports of groups that are gone
        _listening.update(now - before)
        if _store is not None and _world_size > 1:
            _store.set(f"{KEY}/{_rank}", json.dumps(sorted(_listening)))


def _peers() -> set[Endpoint]:
    """Where the groups of the other ranks listen; what was known last where the store cannot be asked any more."""
    if _store is None:
        return set()
    keys = [f"{KEY}/{rank}" for rank in range(_world_size) if rank != _rank]
    with suppress(RuntimeError):
        told = [key for key in keys if _store.check([key])]
        values = _store.multi_get(told) if told else []
        _known.clear()
        _known.update((host, port) for value in values for host, port in json.loads(value))
    return _known


def _listens_on() -> set[Endpoint]:
    return {here for _, here, there in _sockets() if there is None}


def _sockets() -> Iterator[tuple[int, Endpoint, Endpoint | None]]:
    """TCP sockets of this process: file descriptor, own end, other end; None for a listening one."""
    for one in psutil.Process().net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN:
            yield one.fd, _endpoint(one.laddr), None
        elif one.raddr:
            yield one.fd, _endpoint(one.laddr), _endpoint(one.raddr)


def _endpoint(address: Any) -> Endpoint:
    """Host and port; an IPv4 address in IPv6 clothes is the same endpoint."""
    return address[0].removeprefix("::ffff:"), address[1]
