"""One cluster as the notebook sees it: what each word of the user does."""

from __future__ import annotations

import atexit
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import cloudpickle
from ipyparallel import RemoteError

from ddl_magics import comparison, debugging, errors, postmortem
from ddl_magics.cells import Cells
from ddl_magics.chat import Chat
from ddl_magics.cluster.cluster import Cluster
from ddl_magics.cluster.options import ClusterOptions
from ddl_magics.errors import CellInterrupted, NoClusterError, StartError, TransferError, UsageError
from ddl_magics.foresight import Foresight
from ddl_magics.protocol import World
from ddl_magics.strategies import spec as specs
from ddl_magics.telemetry.runs import Runs
from ddl_magics.views import check, table
from ddl_magics.views.panel import Panel
from ddl_magics.views.status import StatusRow
from ddl_magics.views.where import ANSWER_S, show_where, where

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddl_magics.parsing import CellOptions
    from ddl_magics.views.screen import Screen

T = TypeVar("T")


class Session:
    """Keeps one cluster and what has run on it. `screen` makes a place to write to for the cell that runs now."""

    def __init__(self, screen: Callable[[], Screen]) -> None:
        self._screen = screen
        self._options = ClusterOptions()
        self._cells: Cells | None = None
        self._chat: Chat | None = None
        self._chats = 0
        self._foresight = Foresight([])
        self.strategy = specs.parse(specs.DEFAULT)
        """Strategy of cells that name none."""
        self.runs = Runs()
        self.ended_well: dict[int, str] = {}
        """Numbers of cells that ended well, and the session's strategy when they began."""
        atexit.register(self.close)

    @property
    def cells(self) -> Cells:
        """The cells of the cluster. Raises NoClusterError where there is none."""
        if self._cells is None:
            msg = "no ranks are running"
            raise NoClusterError(msg, "Start them with %ddl start")
        return self._cells

    # Ranks.

    def start(self, options: ClusterOptions) -> None:
        """Start the ranks; the same start again says what runs, a different one is an error."""
        screen = self._screen()
        if self._cells is not None:
            self._cells.deaths.check()
            wanted, running = options.world_size(), self._cells.cluster.n
            if replace(options, n=wanted, strategy=None) == replace(self._options, n=running, strategy=None):
                self._set_default(options)
                screen.write("stdout", f"already running: {self._summary()}\n")
                return
            msg = f"{running} ranks run already, with other options"
            raise UsageError(msg, "%ddl restart with these options starts anew; variables on the ranks are lost")
        began = time.monotonic()
        shown = [0]

        def tell(text: str) -> None:
            screen.write("stdout", "\r" + text.ljust(shown[0]))
            shown[0] = len(text)

        if options.strategy:
            specs.check(specs.parse(options.strategy), options.world_size(), options.world_size())
        self._set_default(options)
        cluster = Cluster(options)
        try:
            cluster.start(tell)
            self._join(cluster, tell)
        except KeyboardInterrupt:
            to_the_end(cluster.stop)
            raise CellInterrupted("the start was stopped; none of its processes is left") from None
        except BaseException:
            to_the_end(cluster.stop)
            raise
        self._options = replace(options, n=cluster.n)
        self._cells = Cells(cluster, self.runs)
        self._cells.deaths.screen = screen
        self._foresight = Foresight([fact["local_rank"] for fact in cluster.facts])
        tell(f"{self._summary()}, {time.monotonic() - began:.1f} s")
        screen.write("stdout", "\n")

    def _set_default(self, options: ClusterOptions) -> None:
        if options.strategy:
            self.strategy = specs.parse(options.strategy)

    def _join(self, cluster: Cluster, tell: Callable[[str], None]) -> None:
        """Make one process group of the ranks."""
        versions = sorted({fact["torch"] for fact in cluster.facts})
        if len(versions) > 1:
            msg = f"the ranks have different versions of torch: {', '.join(versions)}"
            raise StartError(msg, "Use one environment on all nodes")
        everywhere = cluster.facts[0]["nodes"] > 1
        opened = cluster.wait(cluster.client.call("ddl_magics.rank.bootstrap:open_store", {0: (everywhere,)}))
        host, port = opened[0]
        tell("torch imported, making the process group ...")
        worlds = {
            fact["rank"]: World(
                rank=fact["rank"],
                world_size=cluster.n,
                local_rank=fact["local_rank"],
                local_world_size=fact["local_size"],
                node_rank=fact["node_rank"],
                nodes=fact["nodes"],
            )
            for fact in cluster.facts
        }
        joined = cluster.wait(
            cluster.client.call(
                "ddl_magics.rank.bootstrap:join",
                {rank: (world.to_wire(), host, port) for rank, world in worlds.items()},
            )
        )
        for fact in cluster.facts:
            fact.update(joined[fact["rank"]])
        cluster.write_card()

    def _summary(self) -> str:
        facts = self.cells.cluster.facts
        hosts = list(dict.fromkeys(fact["host"] for fact in facts))
        devices = list(dict.fromkeys(fact["device"].partition(":")[0] for fact in facts))
        where = (
            hosts[0]
            if len(hosts) == 1
            else f"{len(hosts)} nodes ({', '.join(hosts[:4])}{'...' if len(hosts) > 4 else ''})"
        )
        return f"{len(facts)} ranks on {where}, {'/'.join(devices)}, {facts[0]['backend']}"

    def stop(self) -> bool:
        """End all ranks, verified gone; whether an interrupt came meanwhile."""
        presses: list[bool] = []
        screen = self._screen()
        cells = self.cells
        self._open_chat(None)
        cells.deaths.close()
        killed = to_the_end(cells.cluster.stop, lambda: presses.append(True))
        cells.close()
        self._cells = None
        hard = f" ({len(killed)} processes had to be killed)" if killed else ""
        screen.write("stdout", f"{cells.cluster.n} ranks stopped{hard}\n")
        return bool(presses)

    def restart(self, changes: dict[str, Any]) -> None:
        """End the ranks and start them again, with the same options but for what is given."""
        if self._cells is None:
            self.start(replace(self._options, **changes))
            return
        options = replace(self._options, **changes)
        if options.n == self._options.n and {"nproc_per_node", "device"} & set(changes):
            options = replace(options, n=None)
        if self.stop():
            self._options = options
            raise CellInterrupted("the ranks were stopped and not started again; %ddl restart starts them")
        self.start(options)

    def close(self) -> None:
        """End the ranks without a word, when the kernel goes."""
        self._open_chat(None)
        cells, self._cells = self._cells, None
        if cells and not self._options.keep:
            cells.deaths.close()
            cells.cluster.stop()
            cells.close()

    def status(self) -> None:
        """Show a table of the ranks."""
        screen = self._screen()
        cells = self.cells
        cells.deaths.check()
        answers = cells.cluster.client.answers("state", list(range(cells.cluster.n)), timeout=2.0)
        rows = []
        for fact in cells.cluster.facts:
            state = answers.get(fact["rank"], {"state": "no answer"})
            rows.append(StatusRow.of(fact, state))
        table.show_status(rows, screen)

    def where(self, rank: int | None, *, full: bool) -> None:
        """Show where every rank is, or one, also while a cell runs in the background; `full`: every frame."""
        screen = self._screen()
        cells = self.cells
        cells.deaths.check()
        self._check_rank(rank)
        n = cells.cluster.n
        answers = cells.cluster.client.answers("stack", list(range(n)), ANSWER_S)
        ended: set[int] = set()
        if cells.running and not cells.running.done:
            ended = set(cells.running.idle)
            answers |= {r: {"state": "outside"} for r in range(n) if r not in cells.running.stream.ranks}
        show_where(where(answers, n, ended=ended, rank=rank, full=full), screen)

    # Cells.

    def run(self, code: str, options: CellOptions, line: str, number: int, namespace: dict[str, Any]) -> None:
        """Run a cell on the ranks; the results by rank go into `namespace`, where they were asked for."""
        cells = self.cells
        cells.check_ready()
        requests = cells.requests(code, options, self.strategy, number)
        screen = self._screen()
        default = self.strategy.text
        if any(request.strategy != "single" for request in requests):
            self._foresight.tell(
                f"%%ddl\n{code}", options.ranks, lambda text: screen.write("stderr", text), strict=options.strict
            )

        def work() -> None:
            opened: list[dict[str, Any]] = []
            cells.run(requests, options, line, screen, opened.append)
            if opened:
                self._chats += 1
                self._open_chat(Chat(opened[-1], self._chats, cells, number, screen))
            if options.keep_as is not None:
                ranks = requests[-1].ranks or range(cells.cluster.n)
                namespace[options.keep_as] = self._fetch("result", dict.fromkeys(ranks, (number,)))
            self.ended_well[number] = default

        if options.background:
            cells.in_background(work, screen)
        else:
            work()

    def _open_chat(self, chat: Chat | None) -> None:
        """Show a chat in the place of the one before; None: no chat is open any more."""
        before, self._chat = self._chat, chat
        if before:
            before.close()
        if chat:
            chat.open()

    def chat(self, text: str) -> None:
        """Say something in the chat that is open, or talk on until an empty line."""
        screen = self._screen()
        if self._chat is None:
            msg = "no chat is open"
            raise UsageError(msg, "ddl.chat(model, tokenizer) in a %%ddl cell opens one")
        if text:
            self._chat.ask(text, screen)
        else:
            self._chat.converse(screen)

    def wait(self) -> None:
        """Wait for the cell that runs in the background."""
        self.cells.wait(self._screen())

    def set_strategy(self, wanted: tuple[specs.StrategySpec, ...]) -> None:
        """Show the strategy of cells that name none, or set it."""
        if len(wanted) > 1:
            msg = "later cells run under one strategy"
            raise UsageError(msg, "Several belong to one cell: %%ddl --strategy single,ddp")
        if wanted:
            cells = self._cells
            if cells:
                local = max(fact["local_size"] for fact in cells.cluster.facts)
                wanted = (specs.check(wanted[0], cells.cluster.n, local),)
            self.strategy = wanted[0]
        self._screen().write("stdout", f"strategy of later cells: {self.strategy.text}\n")

    def log(self, rank: int | None) -> None:
        """Print the full output of a rank, or of all."""
        cells = self.cells
        self._check_rank(rank)
        self._screen().write("stdout", cells.spool.read(rank) or "no output yet\n")

    def debug(self, ranks: tuple[int, ...] | Literal["all"] | None, commands: list[str]) -> None:
        """Open the debugger's prompt on ranks, or execute commands there."""
        cells = self.cells
        running = cells.running
        if cells.background and running and running.stopped:
            if commands:
                debugging.command_beside(running, ranks, commands, self._screen())
            else:
                debugging.converse_beside(running, ranks, self._screen())
            return
        cells.check_ready()
        for rank in ranks or () if ranks != "all" else ():
            self._check_rank(rank)
        screen = self._screen()
        with cells.deaths.spoken_for(screen):
            try:
                postmortem.debug(cells.cluster, ranks, commands, screen, cells.health.cut_off)
            except RemoteError as error:
                if error.ename != "EngineError":
                    raise
                raise cells.deaths.error() from None  # a command ended the rank's process

    # Variables.

    def push(self, values: dict[str, Any]) -> None:
        """Set variables on every rank."""
        cells = self.cells
        cells.check_ready()
        blobs = {}
        for name, value in values.items():
            try:
                blobs[name] = cloudpickle.dumps(value)
            except Exception as error:
                msg = f"{name!r} ({type(value).__name__}) cannot be sent: {error}"
                raise TransferError(msg) from error
        self._call("push", dict.fromkeys(range(cells.cluster.n), (blobs,)))

    def pull(self, names: list[str], rank: int | None) -> dict[str, Any]:
        """Variables of the ranks: by name a list by rank, or the value of one rank."""
        cells = self.cells
        cells.check_ready()
        self._check_rank(rank)
        ranks = range(cells.cluster.n) if rank is None else [rank]
        blobs = self._call("pull", dict.fromkeys(ranks, (names,)))
        by_rank = {r: {name: cloudpickle.loads(blob) for name, blob in found.items()} for r, found in blobs.items()}
        if rank is not None:
            return by_rank[rank]
        return {name: [by_rank[r][name] for r in ranks] for name in names}

    def check(self, names: list[str]) -> None:
        """Compare variables, or other expressions, across ranks."""
        cells = self.cells
        cells.check_ready()

        def ask(function: str, args: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
            futures = cells.cluster.client.call(f"ddl_magics.rank.compare:{function}", args)
            try:
                return cells.cluster.wait(futures, timeout=float("inf"))
            except KeyboardInterrupt:
                raise CellInterrupted(
                    "the comparison was stopped; the ranks may still be reading a large value"
                ) from None

        check.show(comparison.check(names, list(range(cells.cluster.n)), ask), self._screen())

    def _fetch(self, function: str, args: dict[int, tuple[Any, ...]]) -> list[Any]:
        return [cloudpickle.loads(blob) for _, blob in sorted(self._call(function, args).items())]

    def _call(self, function: str, args: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a function of rank.transfer; an error of ours on a rank is raised as it was there, with the rank."""
        cluster = self.cells.cluster
        futures = cluster.client.call(f"ddl_magics.rank.transfer:{function}", args)
        try:
            self.cells.deaths.await_answers(futures.values())
        except KeyboardInterrupt:
            raise CellInterrupted("not waited for; the ranks end it by themselves") from None
        return cluster.wait(futures, timeout=float("inf"))

    def _check_rank(self, rank: int | None) -> None:
        n = self.cells.cluster.n
        if rank is not None and not 0 <= rank < n:
            msg = f"there is no rank {rank}"
            raise UsageError(msg, f"The ranks are 0 to {n - 1}")

    # Runs.

    def show_runs(self) -> None:
        """Compare the runs of this session in a table."""
        screen = self._screen()
        if not len(self.runs):
            screen.write("stdout", "no training runs yet\n")
            return
        table.show_runs(self.runs.rows(), screen)

    def show_run(self, key: str | None) -> None:
        """Redraw the picture of one run."""
        histories = self.runs.histories()
        if not histories:
            msg = "there are no training runs yet"
            raise UsageError(msg, "A cell that calls ddl.backward or ddl.log makes one")
        history = self.runs.get(key) if key else histories[-1]
        if history is None:
            msg = f"there is no run {key!r}"
            raise UsageError(msg, errors.nearest(key or "", [h.info.name for h in histories]))
        Panel(history, self._screen()).freeze()


def to_the_end(work: Callable[[], T], interrupted: Callable[[], object] = lambda: None) -> T:
    """Do what must not be left half done: an interrupt waits until it is over, and is told. Raises what it raises."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while not future.done():
            try:
                wait([future])
            except KeyboardInterrupt:
                interrupted()
    return future.result()
