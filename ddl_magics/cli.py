"""`%ddl`'s words in a terminal, for when a cell blocks the kernel: `ddl-magics status|where|log|stop`."""

from __future__ import annotations

import argparse
import os
import sys
import time

from ddl_magics.cluster import terminal
from ddl_magics.cluster.folder import ClusterFolder, clusters
from ddl_magics.errors import DDLError, NoClusterError, UsageError
from ddl_magics.telemetry.spool import Spool
from ddl_magics.views import table
from ddl_magics.views.screen import TerminalScreen
from ddl_magics.views.status import StatusRow
from ddl_magics.views.where import ANSWER_S, show_where, where

VERBS = {
    "status": "show every rank",
    "where": "where every rank is, and who waits for whom",
    "log": "full output of the ranks",
    "stop": "end all ranks",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the program; the exit status is 1 for an error of the user or of a cluster."""
    parser = argparse.ArgumentParser(
        prog="ddl-magics", description="Look after the ranks of a notebook, from a terminal."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="|".join(VERBS))
    for verb, says in VERBS.items():
        sub = verbs.add_parser(verb, help=says, description=says)
        sub.add_argument("cluster", nargs="?", help="which cluster, when there are several (see status)")
        if verb in ("log", "where"):
            sub.add_argument("--rank", type=int, metavar="R", help="of this rank only")
        if verb == "where":
            sub.add_argument("--full", action="store_true", help="every frame, not your own alone")
    args = parser.parse_args(arguments)
    try:
        if args.verb == "status":
            _status(args.cluster)
        elif args.verb == "where":
            _where(_choose(args.cluster), args.rank, full=args.full)
        elif args.verb == "log":
            print(Spool(_choose(args.cluster).output).read(args.rank), end="")
        else:
            _stop(_choose(args.cluster))
    except DDLError as error:
        print(f"ddl-magics: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `ddl-magics log | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _running() -> list[ClusterFolder]:
    return [folder for folder in clusters() if folder.read_card().alive()]


def _choose(wanted: str | None) -> ClusterFolder:
    """Return the cluster that is meant. Raises where there is none, or several and none is named."""
    running = _running()
    if wanted:
        found = [folder for folder in running if folder.cluster_id == wanted]
        if not found:
            msg = f"there is no cluster {wanted!r}"
            raise UsageError(msg, f"Running: {', '.join(f.cluster_id for f in running) or 'none'}")
        return found[0]
    if not running:
        msg = "no ranks of yours are running on this machine"
        raise NoClusterError(msg, "A notebook starts them by %ddl start")
    if len(running) > 1:
        msg = f"{len(running)} clusters are running"
        raise UsageError(msg, f"Name one: {', '.join(f.cluster_id for f in running)}")
    return running[0]


def _status(wanted: str | None) -> None:
    folders = [_choose(wanted)] if wanted else _running() or [_choose(None)]
    screen = TerminalScreen()
    for folder in folders:
        card = folder.read_card()
        minutes = (time.time() - card.started) / 60
        screen.write(
            "stdout", f"{folder.cluster_id}: {len(card.ranks)} ranks, {minutes:.0f} min, kernel {card.owner.pid}\n"
        )
        states = terminal.ask(folder, "state", ANSWER_S)
        table.show_status(
            [StatusRow.of(rank, states.get(rank["rank"], {"state": "no answer"})) for rank in card.ranks], screen
        )


def _where(folder: ClusterFolder, rank: int | None, *, full: bool) -> None:
    n = len(folder.read_card().ranks)
    if rank is not None and not 0 <= rank < n:
        msg = f"there is no rank {rank}"
        raise UsageError(msg, f"The ranks are 0 to {n - 1}")
    show_where(where(terminal.ask(folder, "stack", ANSWER_S), n, rank=rank, full=full), TerminalScreen())


def _stop(folder: ClusterFolder) -> None:
    card = folder.read_card()
    killed = terminal.stop(folder)
    hard = f" ({len(killed)} processes had to be killed)" if killed else ""
    print(f"{folder.cluster_id}: {len(card.ranks)} ranks stopped{hard}")


if __name__ == "__main__":
    sys.exit(main())
