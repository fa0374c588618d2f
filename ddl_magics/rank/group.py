"""The default process group of a rank: on a store without a fixed port, made anew as often as needed.

All groups of a process live on one store, each generation under a prefix of its own. While a group of ours is open,
`torch.distributed.init_process_group` is ours too: programs that make the group themselves find it made, and find it
again after they destroyed it. Limits: a program that took hold of torch's function before the group was opened calls
torch's own; it then meets a store on MASTER_PORT that serves it once.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # keeps the default group of its first import for good: before there is one
from torch.distributed import distributed_c10d as c10d

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank import collectives, environment, pairs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store, TCPStore

    from ddl_magics.protocol import World

TIMEOUT = timedelta(minutes=30)
"""How long a collective waits before it fails by itself: a long checkpoint of one rank must fit."""

TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
"""Names of the tables of `torch.distributed.distributed_c10d._world`."""

log = logging.getLogger(__name__)
_torch_init = c10d.init_process_group


@dataclass
class Opened:
    """The group that is open, and all that is needed to make it again."""

    world: World
    store: Store
    timeout: timedelta
    backend: str
    generation: int
    overlay: environment.Overlay
    at: float = field(default_factory=time.time)
    """Unix time at which it was opened."""
    origin: Store | None = None
    """The store of the first generation, where this one uses another connection: it may be the server itself."""
    inits: int = 0
    """How often a program made the group again within this generation."""
    adopted: bool = False
    """A program had made the group before us: it is not ours to close."""
    note: Callable[[str], object] = field(default=log.info)


_served: list[TCPStore] = []
_opened: Opened | None = None
_generation = 0


def serve(host: str = "127.0.0.1", timeout: timedelta = TIMEOUT) -> TCPStore:
    """Open a store on a free port of this process; its `host` and `port` are where others join it.

    With a loopback `host` it listens there alone, so that nobody outside this machine reaches it (torch's own store
    listens on every address, whatever its host).
    """
    loopback = host in {"localhost", "127.0.0.1"}
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind(("127.0.0.1" if loopback else "", 0))
    listening.listen(4096)
    return dist.TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        # Shared within this process: a program's own `env://` on rank 0 would otherwise find the port in use.
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def open_store(host: str = "127.0.0.1") -> tuple[str, int]:
    """Open the store that the ranks share, on rank 0, for the life of this process; returns host and port."""
    store = serve(host)
    _served.append(store)
    return store.host, store.port


def join_store(host: str, port: int, timeout: timedelta = TIMEOUT) -> TCPStore:
    """Connect to the store that rank 0 opened; rank 0 does so too."""
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def join(world: World, host: str, port: int, note: Callable[[str], object] = log.info) -> None:
    """Make the default group over the store that rank 0 opened at host and port; a collective of all ranks."""
    open_group(world, join_store(host, port), note=note)


def backend_of(world: World) -> str:
    """The backend for a rank's device: nccl with gloo beside it for CPU tensors, or gloo."""
    return "gloo" if world.device == "cpu" else "cpu:gloo,cuda:nccl"


def open_group(
    world: World,
    store: Store | None = None,
    *,
    timeout: timedelta = TIMEOUT,
    note: Callable[[str], object] = log.info,
) -> None:
    """Make the default group of this world and set torchrun's variables; a collective of all ranks.

    Parameters
    ----------
    world
        This rank's place.
    store
        What `open_store`, `join_store` or `meet` gave; None: `meet` is called.
    timeout
        How long a collective waits before it fails by itself.
    note
        Takes a sentence for the user, when a program's own call is answered by what is open already.
    """
    global _opened, _generation  # noqa: PLW0603 - one process has one default group, as in torch
    if _opened is not None:
        close_group()
    adopted = dist.is_initialized()
    if store is None and adopted:
        store = c10d._get_default_store()
    elif store is None:
        from ddl_magics.rank.rendezvous import meet

        store = meet(world)
    if adopted and dist.get_world_size() != world.world_size:
        raise UsageOnRankError(
            f"A process group of {dist.get_world_size()} ranks is open already, this world has {world.world_size}",
            "Call torch.distributed.destroy_process_group() before.",
        )
    host, port = (store.host, store.port) if isinstance(store, dist.TCPStore) else (None, None)
    overlay = environment.Overlay(environment.variables(world, host, port))
    if world.device != "cpu":
        torch.cuda.set_device(world.device)
    _generation += 1
    pairs.watch(_another_client(store), world.rank, world.world_size)
    _opened = Opened(world, store, timeout, backend_of(world), _generation, overlay, adopted=adopted, note=note)
    if not adopted:
        make(f"ddl/{_generation}")
    _patch(_init_process_group)


def close_group() -> None:
    """Destroy the default group and every other one, and put back the environment and torch's own functions.

    Safe to call twice, and after a program destroyed the group itself.
    """
    global _opened
    if _opened is None:
        return
    opened, _opened = _opened, None
    _patch(_torch_init)
    opened.overlay.remove()
    if opened.adopted:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        _forget_half_made()


def _forget_half_made() -> None:
    """Clear tables of a group whose making broke off: its name would be taken, and counted on some ranks only."""
    for name in TABLES:
        getattr(c10d._world, name).clear()
    c10d._unregister_all_process_groups()
    c10d._world.group_count = 0


def reopen_group(occasion: str = "") -> None:
    """Make a new generation of the default group on the same store; a collective of all ranks.

    Other groups are gone with the old one: whoever kept some must make them again. Their connections are shut first, so
    that a collective in one of them fails at once; a rank that still waits in one is freed. `occasion`: names this
    attempt, the same on all ranks and never used before; with it they agree on the generation, which they may have
    counted differently when an attempt failed on some.
    """
    global _opened, _generation  # noqa: PLW0603 - see open_group
    if _opened is None:
        raise UsageOnRankError("No process group was opened", "Call open_group first.")
    opened = _opened
    opened.adopted = False
    origin = opened.origin or opened.store
    store = _another_client(origin)
    if occasion:
        _generation = _latest_generation(store, occasion, opened.world)
    pairs.shut()
    close_group()
    try:
        open_group(opened.world, store, timeout=opened.timeout, note=opened.note)
    finally:
        _opened = _opened or opened  # for the next attempt, where this one failed
        _opened.origin = origin


def _latest_generation(store: Store, occasion: str, world: World) -> int:
    """The highest generation that any rank has counted; every rank calls it."""
    key = f"ddl/{occasion}"
    store.set(f"{key}/{world.rank}", str(_generation))
    of_all = [f"{key}/{rank}" for rank in range(world.world_size)]
    store.wait(of_all)
    return max(int(value) for value in store.multi_get(of_all))


def _another_client(store: Store) -> Store:
    """A connection of its own to the same store: a thread that waits for a key blocks the connection that it uses."""
    return store.clone() if hasattr(store, "clone") else store


def free_from_store() -> None:
    """Shut this process's connections to the ranks' store, from any thread: a thread that waits for a key is freed."""
    if _opened is None or not isinstance(_opened.store, dist.TCPStore):
        return
    pairs.shut_connections_to(socket.gethostbyname(_opened.store.host), _opened.store.port)


def reopen_where_all_lost_it(occasion: str, patience: float = 10.0) -> None:
    """Make the group again after a program destroyed it on every rank; each rank that lost it calls this.

    Raises
    ------
    UsageOnRankError
        Not all ranks came within `patience` seconds: some still have the group, and a new one cannot be made.
    """
    current = _opened
    if current is None:
        return
    key = f"ddl/{current.generation}/lost/{occasion}"
    lost = current.store.add(key, 1)
    deadline = time.monotonic() + patience
    while lost < current.world.world_size:
        if time.monotonic() > deadline:
            raise UsageOnRankError(
                f"{lost} of {current.world.world_size} ranks destroyed the process group", "Restart them: %ddl restart."
            )
        time.sleep(0.01)
        lost = current.store.add(key, 0)
    reopen_group()


def generation() -> int:
    """Count of groups made in this process; what a strategy keeps is of one generation."""
    return _generation


def counts() -> dict[str, int]:
    """Collectives so far in each group of this generation, see `collectives.counts`."""
    return {} if _opened is None else collectives.counts(_opened.at)


def made(name: str, number: int) -> dict[str, Any] | None:
    """What this rank made as that collective of a group of this generation, see `collectives.recorded`."""
    found = None if _opened is None else collectives.recorded(name, number, _opened.at)
    return None if found is None else found.to_wire()


def is_open() -> bool:
    """Whether a default group of ours stands; a program may have destroyed it."""
    return _opened is not None and dist.is_initialized()


def shared_store() -> Store:
    """Return the store of the present generation, for keys of our own."""
    if _opened is None:
        raise UsageOnRankError("No process group was opened", "Call open_group first.")
    return dist.PrefixStore(f"ddl/{_opened.generation}/own", _opened.store)


def opened() -> Opened | None:
    """Return what is open now."""
    return _opened


def notes_to(note: Callable[[str], object]) -> None:
    """Send the sentences about programs' own calls there from now on."""
    if _opened is not None:
        _opened.note = note


def put(state: Opened | None) -> None:
    """Replace what is open; `rank.alone` sets it aside and puts it back."""
    global _opened  # noqa: PLW0603 - see open_group
    _opened = state


def make(prefix: str) -> None:
    """Make the default group of what is open, under a fresh prefix of its store."""
    opened = cast("Opened", _opened)
    hook = sys.excepthook
    _torch_init(
        backend=opened.backend,
        store=dist.PrefixStore(prefix, opened.store),
        rank=opened.world.rank,
        world_size=opened.world.world_size,
        timeout=opened.timeout,
    )
    # Torch lays one more wrapper around the hook at every init and never takes one off.
    sys.excepthook = hook


def _patch(function: Callable[..., None]) -> None:
    dist.init_process_group = c10d.init_process_group = function


@functools.wraps(_torch_init)
def _init_process_group(backend: str | None = None, init_method: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Stand in for torch's function while a group of ours is open."""
    names = ("timeout", "world_size", "rank", "store")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    opened = _opened
    if opened is None:
        _torch_init(backend, init_method, *args, **kwargs)
        return
    asked = given.get("world_size", -1)
    asked = int(os.environ.get("WORLD_SIZE", opened.world.world_size)) if asked in {-1, None} else asked
    size = dist.get_world_size() if dist.is_initialized() else opened.world.world_size
    if asked != size:
        raise UsageOnRankError(
            f"init_process_group asks for {asked} ranks, and this process is one of {size}",
            "Leave world_size out, or start as many ranks with %ddl start -n.",
        )
    if dist.is_initialized():
        opened.note(f"init_process_group: the process group is open already, world size {size}, and is used.")
        wanted = str(backend).lower()
        if backend is not None and wanted not in opened.backend:
            opened.note(f"init_process_group asks for {wanted}; the open group uses {opened.backend}.")
        return
    if given.get("store") is not None or not (init_method or "env://").startswith(("env://", "tcp://")):
        _torch_init(backend, init_method, *args, **kwargs)
        return
    # The address in MASTER_ADDR and MASTER_PORT is this store's; keys of an earlier group would mislead a new one.
    opened.inits += 1
    make(f"ddl/{opened.generation}/{opened.inits}")
