"""Which collective this rank is in, and how many it has made, also for those that C++ issues (DDP's buckets).

Torch's flight recorder tells, which keeps the last collectives of gloo and of NCCL in a ring; reading it takes a
fraction of a millisecond and works while the main thread is blocked. It is on where TORCH_FR_BUFFER_SIZE is set before
torch makes its first group, as `rank.engine` does. It has no point-to-point calls and no waits for a store: those are
told from the main thread's Python stack. Limits: a torch without a recorder for gloo tells by the stack alone; a call
of MPI is none of torch's and has no name here.
"""

from __future__ import annotations

import json
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

from ddl_magics.protocol import Waiting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

GRACE_S = 0.2
"""A collective that began later than this is under way, not waited in."""

BY_MESSAGES = {
    "send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list", "monitored_barrier",
}  # fmt: skip
"""Functions of torch.distributed that are messages, or made of them, and so not recorded."""
RENDEZVOUS = {"new_group", "init_process_group", "split_group", "_store_based_barrier"}
"""Functions of torch.distributed in which ranks meet by the store."""

_dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)


def under_way(frame: FrameType | None = None) -> Waiting | None:
    """The first collective that this rank began and has not ended; `frame`: where its main thread is."""
    pending = [entry for entry in _entries() if not entry["retired"]]
    # A rank that goes on without waiting for a collective has several under way: it is the first that holds it up.
    oldest = min(pending, key=lambda entry: entry["time_created_ns"], default=None)
    if oldest is not None:
        seconds = time.time() - oldest["time_created_ns"] / 1e9
        return _of_entry(oldest, seconds) if seconds > GRACE_S else None
    return _on_stack(frame)


def counts(since: float = 0.0) -> dict[str, int]:
    """Collectives so far, by name of the process group: in step, all ranks of a group have the same.

    `since`: Unix time at which the present groups began, since names return. A group whose last collective has left
    the ring is left out. Not torch's own sequence number: in gloo that counts messages, which only two ranks have.
    """
    told: dict[str, int] = {}
    for entry in _entries():
        if entry["time_created_ns"] / 1e9 >= since and not entry["is_p2p"]:
            name = str(entry["process_group"][0])
            told[name] = max(told.get(name, 0), int(entry["collective_seq_id"]))
    return told


def recorded(group: str, number: int, since: float = 0.0) -> Waiting | None:
    """The collective of that number that this rank made, or is in; None where the ring has it no more, or not yet."""
    for entry in _entries():
        same = (str(entry["process_group"][0]), int(entry["collective_seq_id"])) == (group, number)
        if same and not entry["is_p2p"] and entry["time_created_ns"] / 1e9 >= since:
            return _of_entry(entry, 0.0)
    return None


def number_of_groups() -> int:
    """How many process groups this rank is in."""
    return len(c10d._world.pg_map)


def name_in(trace: TracebackType | None) -> str:
    """The function of torch.distributed that an error came from; empty where it came from none."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return next((name for name in map(_function_of_torch, frames) if name), "")


def _entries() -> list[dict[str, Any]]:
    if _dump is None:
        return []
    return json.loads(_dump(True, True)).get("entries", [])  # type: ignore[no-any-return]


def _of_entry(entry: dict[str, Any], seconds: float) -> Waiting:
    name = str(entry["process_group"][0])
    return Waiting(
        name=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        seconds=seconds,
        group=_ranks_of(name),
        group_name=name,
        number=int(entry["collective_seq_id"]),
        shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
        dtype=", ".join(dict.fromkeys(entry["input_dtypes"])),
    )


def _ranks_of(name: str) -> tuple[int, ...]:
    world = c10d._world
    for group, known in list(world.pg_names.items()):
        if known == name:
            return tuple(sorted(world.pg_group_ranks.get(group, {})))
    return ()


def _on_stack(frame: FrameType | None) -> Waiting | None:
    for one in outwards(frame):
        function = _function_of_torch(one)
        if function in BY_MESSAGES | RENDEZVOUS:
            return Waiting(name=function, group=_ends(one))
    return None


def _ends(frame: FrameType) -> tuple[int, ...]:
    """Both ends of a message, where its call names the other one; empty where it does not."""
    arguments = frame.f_locals
    peer = next((arguments[name] for name in ("dst", "src") if isinstance(arguments.get(name), int)), None)
    return () if peer is None or c10d._world.default_pg is None else tuple(sorted({c10d.get_rank(), peer}))


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _function_of_torch(frame: FrameType) -> str:
    """Name of a frame's function, where it is one of torch.distributed that a program calls."""
    code = frame.f_code
    if code.co_filename != c10d.__file__ or code.co_name in {"wrapper", "_new_process_group_helper"}:
        return ""
    return code.co_name
