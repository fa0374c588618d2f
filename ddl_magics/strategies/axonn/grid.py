"""The grid of ranks over which AxoNN splits a layer: row x column x depth. Arithmetic only, no torch.

AxoNN's words (Singh et al., "A 4D hybrid algorithm to scale parallel training to thousands of GPUs", 2024): the
weight of a linear layer is cut into `row` pieces along its outputs and `column` pieces along its inputs, and each of
these blocks once more into `depth` flat pieces, which are gathered for use. The rest of the world is data parallel.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

from ddl_magics.errors import SpecError

FORM = "Write axonn:RxCxD (row x column x depth), as in axonn:2x1x1, or axonn alone for one grid a node."


class Grid(NamedTuple):
    """How many ranks stand along each direction."""

    row: int
    column: int
    depth: int

    @property
    def size(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.row * self.column * self.depth

    @property
    def text(self) -> str:
        return f"{self.row}x{self.column}x{self.depth}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `2x1x1`; SpecError for anything but three whole numbers from 1 up."""
        factors = text.lower().replace(" ", "").split("x")
        if len(factors) != len(cls._fields) or not all(f.isdecimal() and int(f) > 0 for f in factors):
            raise SpecError(f"axonn:{text} is not a grid of three factors from 1 up", FORM)
        return cls(*map(int, factors))

    @classmethod
    def square(cls, ranks: int) -> Self:
        """The grid of `ranks` ranks that is as square as they divide: 2 -> 2x1x1, 4 -> 2x2x1, 8 -> 4x2x1."""
        column = max(n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0)
        return cls(ranks // column, column, 1)

    def check(self, world_size: int) -> None:
        """Raise SpecError, naming every factor and the nearest grids that fit, when it does not divide the world."""
        if world_size % self.size:
            choices = " or ".join(f"axonn:{grid.text}" for grid in self.nearest(world_size))
            raise SpecError(
                f"axonn:{self.text}: row {self.row} x column {self.column} x depth {self.depth} = {self.size} ranks "
                f"does not divide the world of {world_size}",
                f"Nearest that do: {choices}.",
            )

    def nearest(self, world_size: int, count: int = 3) -> list[Grid]:
        """Return the grids that divide the world and differ from this one by the smallest ratios, nearest first."""
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        grids = [Grid(r, c, d) for r in divisors for c in divisors for d in divisors if world_size % (r * c * d) == 0]
        return sorted(grids, key=self._distance)[:count]

    def _distance(self, other: Grid) -> tuple[float, int]:
        """Sum of the ratios between factors, as logarithms; of equal ones the grid with more ranks comes first."""
        ratios = sum(abs(math.log(mine / theirs)) for mine, theirs in zip(self, other, strict=True))
        return round(ratios, 9), -other.size
