"""From what was typed to checked values: one parser a verb, one for the cell magic. A mistake is one line."""

from __future__ import annotations

import argparse
import ast
import functools
import keyword
import shlex
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from ddl_magics.errors import UsageError, nearest
from ddl_magics.strategies import spec as specs


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours: one line that names the nearest valid word."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and leaving the kernel."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        options = [word for action in self._actions for word in action.option_strings]
        if unknown:
            msg = f"{self.prog} has no option {unknown[0]!r}" if unknown[0].startswith("-") else (
                f"{self.prog} does not understand {' '.join(unknown)!r}")  # fmt: skip
            raise UsageError(
                msg, nearest(unknown[0], options) if options else f"See %ddl help {self.prog.split()[-1]}."
            )
        msg = f"{self.prog}: {message}"
        raise UsageError(msg, f"See %ddl help {self.prog.split()[-1].lstrip('%')}.")

    def arguments(self) -> list[argparse.Action]:
        """What it takes, in order: `option_strings`, `choices`, `nargs` of each."""
        return list(self._actions)

    def read(self, line: str) -> argparse.Namespace:
        """Parse a line as a shell would split it."""
        return self.parse_args(self.split(line))

    def split(self, line: str) -> list[str]:
        """Take a line apart as a shell does."""
        try:
            return shlex.split(line)
        except ValueError as error:
            msg = f"{self.prog}: {error}"
            raise UsageError(msg, "Close the quotation mark.") from error


PRECISIONS = ("32", "bf16-mixed", "bf16-true")

OPERATORS = "+*/@%&|^<>=!.~"
"""What an expression of its own does not begin with: it is the rest of one with spaces."""


class ExpressionParser(Parser):
    """Takes Python expressions, which keep their quotation marks and what stands in their brackets."""

    def split(self, line: str) -> list[str]:
        """`model batch["x"], f(a, b)` is three."""
        words = [""]
        for character in line.strip() + " ":
            if character in ", \t" and (not words[-1] or _is_whole(words[-1])):
                words.append("")
            else:
                words[-1] += character
        wrong = [word.strip() for word in words if word and (word is words[-1] or word[0] in OPERATORS)]
        if wrong:
            msg = f"{self.prog}: {wrong[0]!r} is not a name nor an expression"
            raise UsageError(msg, 'For example %ddl check model batch["x"]; no spaces outside brackets.')
        return [word for word in words if word]


class TextParser(Parser):
    """Takes the line as it is, an apostrophe too; quotation marks around all of it are left out."""

    def split(self, line: str) -> list[str]:
        """`"What's that?"` is one text."""
        text = line.strip()
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
        text = text[1:-1] if quoted else text
        return ["--", text] if text else []


def _is_whole(text: str) -> bool:
    """Whether a text is an expression by itself, no part of one that goes on after a space."""
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return False
    return True


def add_strategy(parser: Parser) -> None:
    """Add the strategy and its other spellings."""
    parser.add_argument(
        "--strategy", metavar="SPEC", help="single, ddp, zero:3, fsdp, axonn:2x1x1; several with commas"
    )
    parser.add_argument("--stage", type=int, metavar="S", help="another spelling of zero:S")
    parser.add_argument("--grid", type=int, nargs=3, metavar=("R", "C", "D"), help="another spelling of axonn:RxCxD")


def ranks(text: str) -> tuple[int, ...]:
    """Read `0,2-3` as (0, 2, 3)."""
    return _numbers(text, "ranks", "--ranks 0,2-3")


def cells(text: str) -> tuple[int, ...]:
    """Read `3-5,9` as (3, 4, 5, 9)."""
    return _numbers(text, "cells", "--cells 3-5,9")


def _numbers(text: str, what: str, example: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
            msg = f"{text} is not a list of {what}"
            raise UsageError(msg, f"For example {example}.")
        found |= set(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def some_ranks(text: str) -> tuple[int, ...] | Literal["all"]:
    """Read `all`, or ranks as in `0,2-3`."""
    return "all" if text == "all" else ranks(text)


@functools.cache  # argparse asks for the width of the terminal at each argument, which is slow in a kernel
def cell_parser() -> Parser:
    """Build the parser of `%%ddl`."""
    parser = Parser("%%ddl", "Run this cell on every rank at once.")
    add_strategy(parser)
    parser.add_argument("--ranks", metavar="0,2-3", help="only on these ranks")
    parser.add_argument("--precision", choices=PRECISIONS, default="32")
    parser.add_argument(
        "--checkpoint-activations", action="store_true", help="compute activations again in the backward, to keep fewer"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="end ddl.track after N optimizer steps")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of torch, numpy, random and the order of the data")
    parser.add_argument("--name", metavar="RUN", help="name of the run in tables")
    parser.add_argument("--timeout", type=float, metavar="S", help="stop the cell after S seconds")
    parser.add_argument("--keep-frames", action="store_true", help="keep the frames of an out-of-memory error too")
    parser.add_argument("--bg", action="store_true", help="leave the kernel free; follow with %%ddl wait")
    parser.add_argument("--output", choices=("fold", "rank0", "all"), default="fold")
    parser.add_argument("--no-panel", action="store_true", help="no panel while the cell runs")
    parser.add_argument("--strict", action="store_true", help="refuse a cell in which ranks would wait for ever")
    parser.add_argument("-o", dest="keep_as", metavar="NAME", help="keep the results by rank in this variable")
    return parser


def verb_parser(verb: str, description: str) -> Parser:
    """Build the parser of one verb of `%ddl`."""
    kind = {"check": ExpressionParser, "chat": TextParser}.get(verb, Parser)
    parser = kind(f"%ddl {verb}", description)
    _ARGUMENTS.get(verb, lambda _: None)(parser)
    return parser


def _start(parser: Parser) -> None:
    parser.add_argument("-n", type=int, metavar="N", help="number of ranks (default: the GPUs of this machine, else 2)")
    parser.add_argument("--nnodes", type=int, metavar="M", help="number of nodes")
    parser.add_argument("--nproc-per-node", type=int, metavar="K", help="ranks on each node")
    parser.add_argument("--launcher", metavar="NAME", help="auto, mpi or local")
    parser.add_argument("--device", metavar="NAME", help="auto, cpu or cuda")
    parser.add_argument("--strategy", metavar="SPEC", help="strategy of cells that name none")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds until all ranks must be connected")
    parser.add_argument("--env", action="append", metavar="K=V", help="set a variable on the ranks; may be repeated")
    parser.add_argument("--keep", action="store_true", default=None, help="the ranks outlive the kernel")


def _names(parser: Parser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="variable")


def _check(parser: Parser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="variable or expression; rng for the random states")


def _pull(parser: Parser) -> None:
    _names(parser)
    parser.add_argument("--rank", type=int, metavar="R", help="of this rank only")


def _log(parser: Parser) -> None:
    parser.add_argument("--rank", type=int, metavar="R", help="of this rank only")


def _where(parser: Parser) -> None:
    parser.add_argument("--rank", type=int, metavar="R", help="the stack of this rank only")
    parser.add_argument("--full", action="store_true", help="every frame, not your own alone")


def _strategy(parser: Parser) -> None:
    parser.add_argument("spec", nargs="?", metavar="SPEC", help="strategy of cells that name none")
    parser.add_argument("--stage", type=int, metavar="S", help="another spelling of zero:S")
    parser.add_argument("--grid", type=int, nargs=3, metavar=("R", "C", "D"), help="another spelling of axonn:RxCxD")


def _show(parser: Parser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="name of a run (default: the last)")


def _debug(parser: Parser) -> None:
    parser.add_argument(
        "--rank", type=some_ranks, metavar="R|all", help="in these ranks (default: the one that failed first)"
    )
    parser.add_argument(
        "-c", dest="commands", action="append", default=[], metavar="COMMAND", help="run this instead; may be repeated"
    )


def _chat(parser: Parser) -> None:
    parser.add_argument(
        "text", nargs="*", metavar="TEXT", help="what to say, in quotation marks (default: ask, until an empty line)"
    )


def _export(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="the script")
    parser.add_argument(
        "--cells", type=cells, metavar="3-5,9", help="these cells, by their numbers (default: all %%%%ddl cells)"
    )
    parser.add_argument("--notebook", metavar="FILE", help="take text and order from this file")
    parser.add_argument("--force", action="store_true", help="replace a file; what no script can have becomes comments")


def _help(parser: Parser) -> None:
    parser.add_argument("verb", nargs="?", metavar="VERB", help="a verb, or ddl for the cell magic")


_ARGUMENTS: dict[str, Any] = {
    "start": _start, "restart": _start, "strategy": _strategy, "push": _names, "pull": _pull, "check": _check,
    "log": _log,
    "where": _where, "show": _show, "debug": _debug, "chat": _chat, "export": _export, "help": _help,
}  # fmt: skip


def strategies(text: str | None, stage: int | None, grid: list[int] | None) -> tuple[specs.StrategySpec, ...]:
    """Read a strategy and its other spellings; empty where nothing was said."""
    if text is None and stage is None and grid is None:
        return ()
    return tuple(specs.parse_many(specs.merge(text, stage, grid)))


@dataclass(frozen=True)
class CellOptions:
    """Options of a `%%ddl` cell, checked."""

    strategies: tuple[specs.StrategySpec, ...]
    """Empty: the session's."""
    ranks: tuple[int, ...] | None = None
    precision: str = "32"
    checkpoint_activations: bool = False
    steps: int | None = None
    seed: int | None = None
    name: str | None = None
    timeout: float | None = None
    keep_frames: bool = False
    background: bool = False
    output: Literal["fold", "rank0", "all"] = "fold"
    panel: bool = True
    keep_as: str | None = None
    strict: bool = False


def cell_options(line: str) -> CellOptions:
    """Read the line of a `%%ddl` cell. Raises UsageError."""
    args = cell_parser().read(line)
    if args.timeout is not None and args.timeout <= 0:
        msg = f"--timeout {args.timeout:g} is not a time"
        raise UsageError(msg, "It is in seconds and must be above 0.")
    if args.steps is not None and args.steps < 1:
        msg = f"--steps {args.steps} is no number of steps"
        raise UsageError(msg, "Give 1 or more.")
    if args.keep_as is not None and (not args.keep_as.isidentifier() or keyword.iskeyword(args.keep_as)):
        msg = f"-o {args.keep_as} is not a name"
        raise UsageError(msg, "Give the name of a variable.")
    return CellOptions(
        strategies=strategies(args.strategy, args.stage, args.grid),
        ranks=ranks(args.ranks) if args.ranks else None,
        precision=args.precision,
        checkpoint_activations=args.checkpoint_activations,
        steps=args.steps,
        seed=args.seed,
        name=args.name,
        timeout=args.timeout,
        keep_frames=args.keep_frames,
        background=args.bg,
        output=args.output,
        panel=not args.no_panel,
        keep_as=args.keep_as,
        strict=args.strict,
    )
