"""The words that name a strategy: parsing, checking and finding the class behind them. Never imports torch.

A spec is one token, `NAME[:ARGUMENT][,OPTION=VALUE ...]`: `ddp`, `zero:3`, `zero:2,offload=cpu`, `axonn:2x1x1`.
Commas separate specs as well as options; a piece with `=` belongs to the spec before it. What an argument or an
option means is the strategy's own business (`Strategy.parse`); here stands only what all of them share.
Limits: a value cannot contain a comma, and a relative path is read from the rank's working directory.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ddl_magics.errors import SpecError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddl_magics.protocol import World
    from ddl_magics.strategies.base import Strategy

GROUP = "ddl_magics.strategies"
"""Entry-point group: name of a strategy -> its class. Third parties add theirs in the same way."""

DEFAULT = "ddp"
"""The strategy of a cell that names none."""


@dataclass(frozen=True)
class StrategySpec:
    """One strategy with its options, as parsed: hashable, comparable, and spelled in one way only."""

    name: str
    argument: str = ""
    """What stands after the colon, in the strategy's own normal form (`3`, `2x1x1`)."""
    options: tuple[tuple[str, str], ...] = ()
    """Name and value of each option, sorted by name."""

    @property
    def text(self) -> str:
        """The canonical token: parsing it gives this spec again."""
        head = f"{self.name}:{self.argument}" if self.argument else self.name
        return ",".join([head, *(f"{key}={value}" for key, value in self.options)])

    def option(self, key: str, default: str | None = None) -> str | None:
        """Value of one option, or `default` where it was not given."""
        return dict(self.options).get(key, default)

    def __str__(self) -> str:
        return self.text


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def names() -> list[str]:
    """Names of the strategies that are installed here, also third-party ones."""
    return sorted(_entry_points())


def strategy_class(name: str) -> type[Strategy]:
    """Class of the strategy of that name.

    Raises
    ------
    SpecError
        No such strategy, or the package that brings it cannot be imported.
    """
    point = _entry_points().get(name)
    if point is None:
        message = f"There is no strategy {name!r}"
        raise SpecError(message, nearest(name, names()))
    try:
        return cast("type[Strategy]", point.load())
    except (ImportError, AttributeError) as error:
        message = f"Strategy {name!r} cannot be loaded from {point.value}: {error}"
        raise SpecError(message, "Reinstall the package that provides it.") from error


def parse(text: str) -> StrategySpec:
    """Read one spec.

    Raises
    ------
    SpecError
        Unknown name or option, an argument that cannot be, or more than one spec in `text`.
    """
    specs = parse_many(text)
    if len(specs) > 1:
        message = f"{text!r} names {len(specs)} strategies where one is wanted"
        raise SpecError(message, f"Say one of them: {specs[0].text}.")
    return specs[0]


def parse_many(text: str) -> list[StrategySpec]:
    """Read specs separated by commas, in their order: `single,ddp,zero:2,offload=cpu,axonn:2x1x1`."""
    groups: list[list[str]] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if not piece:
            message = f"A strategy is missing in {text!r}"
            raise SpecError(message, f"Valid: {', '.join(names())}, several separated by single commas.")
        head = piece.split(":", 1)[0]
        if "=" not in head:
            groups.append([piece])
        elif groups:
            groups[-1].append(piece)
        else:
            message = f"The option {piece!r} stands before any strategy"
            raise SpecError(message, f"Put it behind its strategy, as in 'zero:2,{piece}'.")
    return [_parse_pieces(pieces) for pieces in groups]


def _parse_pieces(pieces: list[str]) -> StrategySpec:
    name, _, argument = pieces[0].partition(":")
    options: dict[str, str] = {}
    pairs = list(pieces[1:])
    if "=" in argument:  # `zero:offload=cpu`: an option where the argument stands
        pairs.insert(0, argument)
        argument = ""
    for pair in pairs:
        key, _, value = (part.strip() for part in pair.partition("="))
        if not value:
            message = f"Option {key!r} of strategy {name!r} has no value"
            raise SpecError(message, f"Write {key}=VALUE.")
        if options.get(key, value) != value:
            message = f"Option {key!r} of strategy {name!r} is given twice, as {options[key]!r} and as {value!r}"
            raise SpecError(message, "Keep one of them.")
        options[key] = value
    name = name.strip().lower()
    return strategy_class(name).parse(argument.strip(), options)


def merge(strategy: str | None, stage: str | int | None = None, grid: Sequence[str | int] | None = None) -> str:
    """Text of the specs that `--strategy`, `--stage` and `--grid` name together.

    `--stage 3` alone is `zero:3`, `--grid 2 1 1` alone is `axonn:2x1x1`; beside `--strategy` each fills in the
    argument of the specs of its kind that have none.

    Raises
    ------
    SpecError
        The two contradict each other, or no spec can take the option.
    """
    if strategy is None:
        if stage is not None and grid is not None:
            message = "--stage belongs to zero and --grid to axonn, and neither is named"
            raise SpecError(message, f"Say which: --strategy zero:{stage} or --strategy axonn:{_grid_text(grid)}.")
        if stage is None and grid is None:
            return DEFAULT
        strategy = "zero" if stage is not None else "axonn"
    if stage is not None:
        strategy = _fill_in(strategy, "zero", "--stage", str(stage))
    if grid is not None:
        strategy = _fill_in(strategy, "axonn", "--grid", _grid_text(grid))
    return ",".join(spec.text for spec in parse_many(strategy))


def _grid_text(grid: Sequence[str | int]) -> str:
    return "x".join(str(factor) for factor in grid)


def _fill_in(text: str, name: str, flag: str, argument: str) -> str:
    pieces = [piece.strip() for piece in text.split(",")]
    taken = False
    for index, piece in enumerate(pieces):
        head, _, given = piece.partition(":")
        if head.lower() != name:
            continue
        if given and "=" not in given and given != argument:
            message = f"{flag} {argument.replace('x', ' ')} contradicts --strategy {piece}"
            raise SpecError(message, "Keep one of them.")
        options = f",{given}" if "=" in given else ""
        pieces[index] = f"{name}:{argument}{options}"
        taken = True
    if not taken:
        message = f"{flag} is an option of {name}, and --strategy {text} names no {name}"
        raise SpecError(message, f"Write --strategy {name}:{argument}, or leave {flag} out.")
    return ",".join(pieces)


def check(spec: StrategySpec, world_size: int, local_world_size: int) -> StrategySpec:
    """Return `spec` with the defaults that need the world filled in; SpecError where it cannot run there.

    Runs in the notebook before any rank works, so that no rank waits for one that has failed.
    """
    return strategy_class(spec.name).check(spec, world_size, local_world_size)


def shares(spec: StrategySpec, world_size: int) -> dict[str, float]:
    """Share of the whole model's `parameters`, `gradients` and `optimizer` state that one rank holds."""
    return strategy_class(spec.name).shares(spec, world_size)


def load(spec: StrategySpec, world: World) -> Strategy:
    """Make the strategy on this rank, checked against its world."""
    checked = check(spec, world.world_size, world.local_world_size)
    return strategy_class(checked.name)(checked, world)


# What strategies share in reading their own options.


def no_argument(name: str, argument: str) -> None:
    """Raise SpecError when a strategy that takes nothing after its colon was given something."""
    if argument:
        message = f"Strategy {name!r} takes no argument, got {argument!r}"
        raise SpecError(message, f"Write {name!r} alone.")


def known_options(name: str, options: Mapping[str, str], valid: Mapping[str, Sequence[str]]) -> None:
    """Raise SpecError for an option that `valid` does not list, or a value that its entry does not (empty: any)."""
    for key, value in options.items():
        if key not in valid:
            message = f"Strategy {name!r} has no option {key!r}"
            raise SpecError(message, nearest(key, sorted(valid)) if valid else "It takes no options.")
        if valid[key] and value not in valid[key]:
            message = f"Option {key}={value} of strategy {name!r} cannot be"
            raise SpecError(message, f"Valid: {', '.join(f'{key}={choice}' for choice in valid[key])}.")


def require(name: str, package: str, extra: str) -> None:
    """Raise SpecError when a strategy's library is not installed, looking for it without importing it."""
    if importlib.util.find_spec(package) is None:
        message = f"Strategy {name!r} needs the package {package!r}, which is not installed here"
        raise SpecError(message, f"Run: pip install 'ddl-magics[{extra}]'.")


def divide_world(name: str, factors: Mapping[str, int], world_size: int) -> int:
    """How many copies of a grid of ranks fill the world exactly: the data-parallel factor that is left.

    Raises
    ------
    SpecError
        The product of `factors` does not divide the world size; the message shows each of them.
    """
    product = 1
    for factor in factors.values():
        product *= factor
    if product < 1 or world_size % product:
        shown = " x ".join(f"{label} {factor}" for label, factor in factors.items())
        message = f"{name}: {shown} = {product} ranks does not divide the world of {world_size}"
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        remedy = f"Choose factors whose product is {' or '.join(map(str, divisors))}, or start ranks with -n {product}."
        raise SpecError(message, remedy)
    return world_size // product
