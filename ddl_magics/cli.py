"""`%ddl`'s words in a terminal, for when a cell blocks the kernel: `ddl-magics status|where|log|stop`.

Beside them `run`, a script on many ranks, and `export`, a notebook's file as such a script.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from ddl_magics.cluster import run, terminal
from ddl_magics.cluster.folder import ClusterFolder, clusters
from ddl_magics.errors import DDLError, NoClusterError, UsageError
from ddl_magics.parsing import PRECISIONS, cells
from ddl_magics.protocol import PROGRAM_VARIABLES
from ddl_magics.telemetry.spool import Spool
from ddl_magics.views import table
from ddl_magics.views.screen import TerminalScreen
from ddl_magics.views.status import StatusRow
from ddl_magics.views.where import ANSWER_S, show_where, where

RUN = "run a script on many ranks, by whatever starts them here; what follows -- is the script's"
EXPORT = "write a notebook's cells for ranks as a script"
VERBS = {
    "status": "show every rank",
    "where": "where every rank is, and who waits for whom",
    "log": "full output of the ranks",
    "stop": "end all ranks",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the program; the exit status is that of the script, or 1 for an error of the user or of a cluster."""
    typed = sys.argv[1:] if arguments is None else arguments
    ours, of_script = _parted(typed)
    parser = _parser()
    try:
        args, unknown = parser.parse_known_args(ours)  # some arguments are read by functions that raise UsageError
        if unknown and args.verb == "run":
            msg = f"run has no option {unknown[0]!r}"
            raise UsageError(
                msg, f"What the script takes stands after --: ddl-magics run {args.script} -- {unknown[0]}"
            )
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if args.verb == "run":
            return _run(args, of_script)
        _look_after(args)
    except DDLError as error:
        print(f"ddl-magics: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `ddl-magics log | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _look_after(args: argparse.Namespace) -> None:
    if args.verb == "export":
        from ddl_magics.export.cells import read
        from ddl_magics.export.writing import export

        print(export(read(Path(args.notebook)), args.file, args.cells, force=args.force))
    elif args.verb == "status":
        _status(args.cluster)
    elif args.verb == "where":
        _where(_choose(args.cluster), args.rank, full=args.full)
    elif args.verb == "log":
        print(Spool(_choose(args.cluster).output).read(args.rank), end="")
    else:
        _stop(_choose(args.cluster))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddl-magics", description="Look after the ranks of a notebook, from a terminal, and run scripts on ranks."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="|".join([*VERBS, "run", "export"]))
    for verb, says in VERBS.items():
        sub = verbs.add_parser(verb, help=says, description=says)
        sub.add_argument("cluster", nargs="?", help="which cluster, when there are several (see status)")
        if verb in ("log", "where"):
            sub.add_argument("--rank", type=int, metavar="R", help="of this rank only")
        if verb == "where":
            sub.add_argument("--full", action="store_true", help="every frame, not your own alone")
    _add_run(verbs.add_parser("run", help=RUN, description=RUN, allow_abbrev=False))
    _add_export(verbs.add_parser("export", help=EXPORT, description=EXPORT, allow_abbrev=False))
    return parser


def _parted(typed: list[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and what follows it."""
    place = typed.index("--") if "--" in typed else len(typed)
    return typed[:place], typed[place + 1 :]


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="a program that calls ddl_magics.init")
    parser.add_argument("-n", type=int, metavar="N", help="number of ranks (default: the GPUs, else 2)")
    parser.add_argument("--nnodes", type=int, metavar="M", help="number of nodes, in an allocation")
    parser.add_argument("--nproc-per-node", type=int, metavar="K", help="ranks on each node")
    parser.add_argument("--launcher", choices=run.LAUNCHERS, default="auto")
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="set a variable; may be repeated")
    parser.add_argument("--strategy", metavar="SPEC", help="where the script gives none: ddp, zero:3, ...")
    parser.add_argument("--precision", choices=PRECISIONS, help="the same")
    parser.add_argument("--checkpoint-activations", action="store_true", help="the same")
    parser.add_argument("--steps", type=int, metavar="N", help="the same: end ddl.track after N optimizer steps")
    parser.add_argument("--seed", type=int, metavar="S", help="the same")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="the same")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebook", metavar="NOTEBOOK", help="an .ipynb file")
    parser.add_argument("file", metavar="FILE", help="the script")
    parser.add_argument("--cells", type=cells, metavar="3-5,9", help="these cells, by their numbers")
    parser.add_argument("--force", action="store_true", help="replace a file; what no script can have becomes comments")


def _run(args: argparse.Namespace, of_script: list[str]) -> int:
    return run.run(
        run.Wanted(
            script=args.script,
            arguments=tuple(of_script),
            n=args.n,
            nnodes=args.nnodes,
            nproc_per_node=args.nproc_per_node,
            launcher=args.launcher,
            env=tuple(args.env),
            program={name: getattr(args, name) for name in PROGRAM_VARIABLES},
        )
    )


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
