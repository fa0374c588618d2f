"""Numbers with units, in as few characters as say enough. Memory is in binary units, as CUDA's tools report it."""

from __future__ import annotations

import math
from dataclasses import dataclass

NOTHING = "–"
"""For a figure that is not known."""


@dataclass(frozen=True)
class Unit:
    """A unit that many figures of one column share."""

    name: str
    size: float

    def digits(self, value: float) -> str:
        return three_digits(value / self.size)


BYTES = [Unit("B", 1), *(Unit(f"{p}iB", 2.0 ** (10 * i)) for i, p in enumerate("KMGTP", start=1))]


def byte_unit(largest: float) -> Unit:
    """The unit in which `largest` reads as 1 to 999; 1000 to 1023 count as nearly one of the next."""
    fitting = [unit for unit in BYTES if abs(largest) >= 0.9765 * unit.size]
    return fitting[-1] if fitting else BYTES[0]


def size(n: float) -> str:
    """`1.95 GiB`."""
    unit = byte_unit(n)
    return f"{unit.digits(n)} {unit.name}"


def three_digits(x: float) -> str:
    """`26.1`, `1.95`, `340`, `0.98`, `0`."""
    if not math.isfinite(x):
        return number(x)
    magnitude = abs(x)
    if magnitude >= 99.95:
        return f"{x:.0f}"
    if magnitude >= 9.995:
        return f"{x:.1f}"
    return f"{x:.2f}" if magnitude >= 0.005 else "0"


def duration(s: float) -> str:
    """How long one thing takes: `0.85 ms`, `12 ms`, `0.66 s`, `45 s`, and from two minutes on as `clock`."""
    if not math.isfinite(s):
        return NOTHING
    if s < 0.0995:
        return f"{s * 1000:.0f} ms" if s >= 0.00995 else f"{s * 1000:.2g} ms"
    if s < 9.95:
        return f"{s:.2f} s" if s < 0.995 else f"{s:.1f} s"
    return f"{s:.0f} s" if s < 120 else clock(s)


def waited(s: float) -> str:
    """How long something has been so: whole seconds, `11 s`, and from two minutes on as `clock`."""
    return f"{round(s)} s" if s < 120 else clock(s)


def clock(s: float) -> str:
    """`3:31`, `1:02:03`, `2 d 03:04`."""
    total = max(0, round(s))
    minutes, seconds = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def rate(x: float) -> str:
    """`950`, `12.4 k`, `1.20 M`; the caller adds what is counted."""
    for factor, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(x) >= 0.9995 * factor:
            return three_digits(x / factor) + prefix
    return three_digits(x)


def number(x: float) -> str:
    """A metric's value in three or four digits: `1.842`, `0.841`, `0.0123`, `2.8e−5`, `NaN`, `−inf`."""
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "inf" if x > 0 else "−inf"
    if x == 0:
        return "0"
    if 1e-3 <= abs(x) < 1e5:
        decimals = 3 - math.floor(math.log10(abs(x))) - (abs(x) < 1)
        return f"{x:.{max(0, decimals)}f}".replace("-", "−")
    mantissa, exponent = f"{x:.3g}".split("e") if "e" in f"{x:.3g}" else f"{x:.2e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}".replace("-", "−")


def plural(n: int, noun: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
