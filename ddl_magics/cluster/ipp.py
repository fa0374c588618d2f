"""What we need of ipyparallel's private interface on the notebook's side, and nothing else of it.

Private parts used: `Client._dispatch_iopub`, `_send`, `_control_stream`, `_mux_socket`, `_engines`,
`_registration_callbacks`, `_output_futures`, `MessageFuture.output`. tests/cluster/test_ipp_contract.py holds them.

Why not `%px`'s own way: it keeps and re-publishes the whole text of a cell with each new chunk, drops what comes after
the cell's end, and one exception in a callback ends all output of the client for good. Here the IO thread only puts
messages into queues.
"""

from __future__ import annotations

import json
import queue
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import ipyparallel as ipp
from ipyparallel.client.client import unpack_message

from ddl_magics.protocol import TELEMETRY, CellRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

REMEMBERED_CELLS = 256
"""Of how many requests late output (a thread that prints after its cell) still finds its cell."""

Message = tuple[int, str, dict[str, Any]]
"""(rank, message type, content)."""


def _call(target: str, *args: Any, **kwargs: Any) -> Any:
    """Runs on the rank: call `module:function`. Self-contained, because ipyparallel ships its code, not its module."""
    from importlib import import_module

    module, function = target.split(":")
    return getattr(import_module(module), function)(*args, **kwargs)


class CellStream:
    """Messages of one cell as they arrive: a queue that the IO thread fills and the notebook's thread drains."""

    def __init__(self, request: CellRequest, ranks: list[int]) -> None:
        self.request = request
        self.queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.replies: dict[int, Future[Any]] = {}
        self.idle: set[int] = set()
        self.ranks = ranks

    def engine_died(self, rank: int) -> bool:
        """Whether ipyparallel answered in place of a rank, because its engine is gone."""
        reply = self.replies[rank]
        if not reply.done():
            return False
        answer = reply.exception() or reply.result()
        return "EngineError" in {type(answer).__name__, getattr(answer, "ename", "")}

    def drain(self, timeout: float) -> list[Message]:
        """Return what has arrived; wait for the first at most `timeout` seconds."""
        messages = []
        try:
            messages.append(self.queue.get(timeout=timeout))
            while True:
                messages.append(self.queue.get_nowait())
        except queue.Empty:
            return messages


class RankClient(ipp.Client):
    """A client that knows ranks, routes their messages by cell, and carries telemetry between cells too."""

    def __init__(self, connection_file: Path) -> None:
        self._streams: OrderedDict[str, tuple[int, CellStream]] = OrderedDict()
        self.on_telemetry: Callable[[dict[str, Any]], None] | None = None
        self.on_late: Callable[[CellStream, Message], None] | None = None
        """Called in the IO thread for what a cell sends after it ended. Must not raise and not block."""
        self.on_leave: Callable[[int], None] | None = None
        """Called in the IO thread with the number of an engine that left. Must not raise and not block."""
        self.engine_of: dict[int, int] = {}
        """Rank to engine: asked to be equal, verified at the start, not promised."""
        connection = json.loads(connection_file.read_text())
        super().__init__(connection, profile_dir=str(connection_file.parent.parent))
        self._registration_callbacks.append(self._engine_event)

    def activate(self, *args: Any, **kwargs: Any) -> None:
        """Define no `%px` magics: the user's kernel stays as it was."""

    def _engine_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "unregister" and self.on_leave:
            self.on_leave(event["id"])

    @unpack_message  # type: ignore[untyped-decorator]
    def _dispatch_iopub(self, msg: dict[str, Any]) -> None:
        kind, content, parent = msg["msg_type"], msg["content"], msg["parent_header"]
        if kind == TELEMETRY:
            if self.on_telemetry:
                self.on_telemetry(content)
            return
        msg_id: str = parent.get("msg_id", "") if parent else ""
        route = self._streams.get(msg_id)
        if route is None or kind.startswith("comm_"):  # widgets of the ranks are relayed by ipyparallel
            ipp.Client._dispatch_iopub.__wrapped__(self, msg)
            return
        rank, stream = route
        if kind == "status":
            if content["execution_state"] == "idle":
                self._finish_output(msg_id)
                stream.idle.add(rank)
                stream.queue.put((rank, "idle", content))
        elif kind != "execute_input":
            target = self.on_late if rank in stream.idle else None
            target(stream, (rank, kind, content)) if target else stream.queue.put((rank, kind, content))

    def _finish_output(self, msg_id: str) -> None:
        future = self._output_futures.get(msg_id)
        if future and not future.done():
            future.set_result(None)

    def run_cell(self, request: CellRequest, ranks: list[int], code: str) -> CellStream:
        """Send one cell to ranks; its messages arrive in the stream that is returned."""
        stream = CellStream(request, ranks)
        wire = request.to_wire()
        del wire["code"]  # the message's own content carries it
        for rank in ranks:
            stream.replies[rank] = self.send_execute_request(
                self._mux_socket,
                code,
                silent=False,
                ident=self._ident(rank),
                metadata={"ddl": wire},
                message_future_hook=lambda future, rank=rank: self._remember(future.msg_id, rank, stream),
            )
        self.history.clear()  # grows with every request, and nothing of ours reads it
        return stream

    def _remember(self, msg_id: str, rank: int, stream: CellStream) -> None:
        self._streams[msg_id] = rank, stream
        while len(self._streams) > max(REMEMBERED_CELLS, 2 * len(stream.ranks)):
            self._streams.popitem(last=False)

    def call(self, target: str, args_by_rank: dict[int, tuple[Any, ...]]) -> dict[int, Future[Any]]:
        """Call `module:function` in the main thread of ranks; futures by rank.

        For the notebook's own errands. `args_by_rank` says which ranks and with which arguments.
        """
        return {rank: self[self.engine_of.get(rank, rank)].apply_async(_call, target, *args)
                for rank, args in args_by_rank.items()}  # fmt: skip

    def ask(self, op: str, ranks: list[int], **content: Any) -> dict[int, Future[Any]]:
        """Send a request that a rank answers on its control thread, also while its main thread is blocked.

        Ranks that are gone are left out.
        """
        request, alive = {"op": op, **content}, self.engines()
        return {rank: self._send(self._control_stream, "ddl_request", content=request, ident=self._ident(rank))
                for rank in ranks if self.engine_of.get(rank, rank) in alive}  # fmt: skip

    def answers(self, op: str, ranks: list[int], timeout: float, **content: Any) -> dict[int, Any]:
        """Answers by rank; those that do not answer within `timeout` seconds, or refuse, are left out."""
        futures = self.ask(op, ranks, **content)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and not all(future.done() for future in futures.values()):
            time.sleep(0.005)
        contents = {rank: future.result()["content"] for rank, future in futures.items() if future.done()}
        return {rank: content["result"] for rank, content in contents.items() if content["status"] == "ok"}

    def signal(self, number: int, ranks: list[int]) -> None:
        """Send a signal to ranks' processes through their nannies, without waiting for the answer."""
        self.send_signal(number, targets=[self.engine_of[rank] for rank in ranks], block=False)

    def _ident(self, rank: int) -> bytes:
        return str(self._engines[self.engine_of.get(rank, rank)]).encode()

    def engines(self) -> list[int]:
        """Return the engines that are registered now."""
        return list(self.ids)
