"""The words a user types in a notebook: `%ddl VERB` and `%%ddl`; one call on Session each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from ddl_magics import parsing
from ddl_magics.cluster.options import ClusterOptions
from ddl_magics.completion import CellCompletion
from ddl_magics.errors import UsageError, nearest
from ddl_magics.export.record import Record
from ddl_magics.session import Session
from ddl_magics.views.screen import current_screen

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

VERBS = {
    "start": "Start the ranks, one a GPU, or 2 on the CPU.",
    "status": "Show every rank: host, pid, device, memory, state, current line.",
    "where": "Show where every rank is, and who waits for whom.",
    "stop": "End all ranks.",
    "restart": "End all ranks and start them again, with the same options unless given.",
    "strategy": "Show or set the strategy of later cells.",
    "push": "Copy variables of this notebook to every rank.",
    "pull": "Copy variables of the ranks here: a list by rank, tensors on the CPU.",
    "check": "Compare variables across ranks: which ranks hold the same, and where the others differ.",
    "log": "Show the full output of the ranks, also what was folded.",
    "wait": "Wait for a cell that runs in the background.",
    "debug": "Look into the frames of ranks that failed, or that stopped at a breakpoint().",
    "chat": "Say something in the chat that ddl.chat opened.",
    "runs": "Compare the training runs of this session.",
    "show": "Draw the picture of a run again.",
    "export": "Write the %%ddl cells as a script for torchrun, mpiexec or srun.",
    "help": "Show the verbs, or the options of one.",
}


@magics_class
class DDLMagics(Magics):
    """`%ddl` and `%%ddl`."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell
        self.session = Session(lambda: current_screen(shell))
        self.record = Record(shell, self.session.ended_well.get)
        self.completion = CellCompletion(shell, self.session, VERBS)

    @no_var_expand
    @line_magic("ddl")  # type: ignore[arg-type]
    def line(self, line: str) -> Any:
        """Bring up ranks and look after them: `%ddl VERB [options]`.

        Verbs: start, status, where, stop, restart, strategy, push, pull, check, log, wait, debug, chat, runs, show,
        export, help.
        `%ddl help VERB` shows the options of one; a cell that begins with `%%ddl` runs on every rank.
        """
        verb, _, rest = line.strip().partition(" ")
        verb = verb or "help"
        if verb not in VERBS:
            msg = f"%ddl has no verb {verb!r}"
            raise UsageError(msg, nearest(verb, list(VERBS)))
        args = vars(parsing.verb_parser(verb, VERBS[verb]).read(rest))
        return getattr(self, f"_{verb}")(**args)

    @no_var_expand
    @cell_magic("ddl")  # type: ignore[arg-type]
    def cell(self, line: str, cell: str) -> None:
        """Run the cell on every rank: `%%ddl [--strategy SPEC] [options]`; `%ddl help ddl` shows the options."""
        options = parsing.cell_options(line)
        number = len(self._shell.user_ns["In"]) - 1  # IPython 9 has counted on already
        self.session.run(cell, options, line, number, self._shell.user_ns)

    def _start(self, **args: Any) -> None:
        self.session.start(_cluster_options(args))

    def _restart(self, **args: Any) -> None:
        changes = {name: value for name, value in args.items() if value is not None}
        if "env" in changes:
            changes["env"] = tuple(changes["env"])
        self.session.restart(changes)

    def _status(self) -> None:
        self.session.status()

    def _where(self, rank: int | None, full: bool) -> None:
        self.session.where(rank, full=full)

    def _stop(self) -> None:
        self.session.stop()

    def _strategy(self, spec: str | None, stage: int | None, grid: list[int] | None) -> None:
        self.session.set_strategy(parsing.strategies(spec, stage, grid))

    def _push(self, names: list[str]) -> None:
        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            msg = f"this notebook has no variable {', '.join(map(repr, missing))}"
            raise UsageError(msg, "%ddl push copies from here to the ranks; the other way is %ddl pull")
        self.session.push({name: self._shell.user_ns[name] for name in names})

    def _pull(self, names: list[str], rank: int | None) -> None:
        self._shell.user_ns.update(self.session.pull(names, rank))

    def _check(self, names: list[str]) -> None:
        self.session.check(names)

    def _log(self, rank: int | None) -> None:
        self.session.log(rank)

    def _wait(self) -> None:
        self.session.wait()

    def _debug(self, rank: tuple[int, ...] | Literal["all"] | None, commands: list[str]) -> None:
        self.session.debug(rank, commands)

    def _chat(self, text: list[str]) -> None:
        self.session.chat(" ".join(text))

    def _runs(self) -> None:
        self.session.show_runs()

    def _show(self, run: str | None) -> None:
        self.session.show_run(run)

    def _export(self, file: str, cells: tuple[int, ...] | None, notebook: str | None, force: bool) -> None:
        from ddl_magics.export.writing import export

        told = export(self.record.notebook(Path(notebook) if notebook else None), file, cells, force=force)
        current_screen(self._shell).write("stdout", told + "\n")

    def _help(self, verb: str | None) -> None:
        screen = current_screen(self._shell)
        if verb is None:
            width = max(map(len, VERBS))
            lines = [f"%ddl {name:{width}}  {says}" for name, says in VERBS.items()]
            lines.append(f"%%ddl {'':{width - 1}}  Run a cell on every rank; options: %ddl help ddl")
            screen.write("stdout", "\n".join(lines) + "\n")
        elif verb in VERBS:
            screen.write("stdout", parsing.verb_parser(verb, VERBS[verb]).format_help())
        elif verb in ("ddl", "%%ddl"):
            screen.write("stdout", parsing.cell_parser().format_help())
        else:
            msg = f"%ddl has no verb {verb!r}"
            raise UsageError(msg, nearest(verb, [*VERBS, "ddl"]))


def _cluster_options(args: dict[str, Any]) -> ClusterOptions:
    given = {name: value for name, value in args.items() if value is not None}
    if "env" in given:
        given["env"] = tuple(given["env"])
    return ClusterOptions(**given)
