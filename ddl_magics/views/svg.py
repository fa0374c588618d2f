"""Bars, curves and sparklines as SVG text: data in, markup out.

Lengths are in proportion to the data and nothing else. Text and marks are in `currentColor`, so that a picture reads on
a light and on a dark page; there is no script and nothing from outside. Every picture tells its content in a label.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from ddl_magics.telemetry.series import CurvePoint
from ddl_magics.views import format as fmt
from ddl_magics.views.palette import BLUE, KINDS, WARNING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BAR_WIDTH = 1000
"""Units at the right end of a bar's scale; the bar stretches to the room it gets."""
CURVE_POINTS = 240
SPARK_POINTS = 60
LOG_RATIO = 300
"""From this ratio of the greatest to the least positive value on, the axis is logarithmic."""


def memory_bar(kinds: Mapping[str, float], scale: float, label: str, peak: float = 0, height: int = 14) -> str:
    """A stacked bar on a track of length `scale` (bytes), with a mark at `peak`; `label` is its text for readers."""
    per_byte = BAR_WIDTH / scale if scale > 0 else 0.0
    parts = [f'<rect y="3" width="{BAR_WIDTH}" height="{height}" fill="currentColor" fill-opacity=".09"/>']
    x = 0.0
    for kind, (colour, _, _) in KINDS.items():
        width = max(0.0, kinds.get(kind, 0)) * per_byte
        if width > 0:
            parts.append(
                f'<rect class="{kind}" x="{x:.2f}" y="3" width="{width:.2f}" height="{height}" fill="{colour}"/>'
            )
            x += width
    if peak > 0 and scale > 0:
        at = min(peak * per_byte, BAR_WIDTH)
        parts.append(
            f'<path class="peak" d="M{at:.2f} 0V{height + 6}" stroke="currentColor" stroke-width="2" '
            'vector-effect="non-scaling-stroke"/>'
        )
    text = escape(label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {BAR_WIDTH} {height + 6}" width="100%" '
        f'height="{height + 6}" style="height:{height + 6}px;max-width:none" preserveAspectRatio="none" '
        f'overflow="visible" role="img" aria-label="{text}">'
        f"<title>{text}</title>{''.join(parts)}</svg>"
    )


def curve(
    points: Sequence[CurvePoint], label: str, total_steps: int | None = None, size: tuple[int, int] = (450, 170)
) -> str:
    """Mean and min-max band over the steps, with axes; a cross on the lower axis where values were not finite."""
    width, height = size
    left, right, top, bottom = 46, 10, 8, 22
    thin = thinned(points, CURVE_POINTS)
    finite = [p for p in thin if math.isfinite(p.mean)]
    x_end = max([p.step for p in thin] + [total_steps or 0, 1])
    to_x = _linear(0, x_end, left, width - right)
    low, high, log = y_range(finite)
    to_y = _axis(low, high, height - bottom, top, log=log)
    parts = []
    for value in _log_ticks(low, high) if log else ticks(low, high, 4):
        y = to_y(value)
        parts.append(
            f'<path d="M{left} {y:.1f}H{width - right}" stroke="currentColor" stroke-opacity=".13"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_text(value, low, high, log=log)}</text>'
        )
    step_ticks = [t for t in ticks(0, x_end, 5) if t == int(t)]
    for at in step_ticks:
        x = to_x(at)
        anchor = "end" if x > width - right - 12 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="{anchor}">{_step_text(at)}</text>')
    parts.append(f'<text x="{left - 6}" y="{height - 6}" text-anchor="end">step</text>')

    def clip(value: float) -> float:
        return to_y(min(max(value, low), high))

    if any(p.high > p.low for p in finite):
        upper = [f"{to_x(p.step):.1f} {clip(p.high):.1f}" for p in finite]
        lower = [f"{to_x(p.step):.1f} {clip(p.low):.1f}" for p in reversed(finite)]
        parts.append(f'<path class="band" d="M{"L".join(upper + lower)}Z" fill="{BLUE}" fill-opacity=".3"/>')
    parts.append(_mean_line([(to_x(p.step), clip(p.mean)) for p in finite]))
    base = height - bottom
    for p in [p for p in thin if p.wild][:40]:
        x = to_x(p.step)
        parts.append(
            f'<path class="wild" d="M{x - 3:.1f} {base - 3}l6 6m0 -6l-6 6" stroke="{WARNING}" stroke-width="1.5"/>'
        )
    text = escape(label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="100%" '
        f'style="max-width:{width}px;display:block" role="img" aria-label="{text}">'
        f"<title>{text}</title>"
        f'<g font-size="11" fill="currentColor" fill-opacity=".75" stroke="none">{"".join(parts)}</g></svg>'
    )


def spark(points: Sequence[CurvePoint], label: str, size: tuple[int, int] = (90, 18)) -> str:
    """A small line without axes."""
    width, height = size
    thin = thinned(points, SPARK_POINTS)
    finite = [p for p in thin if math.isfinite(p.mean)]
    low, high = min((p.mean for p in finite), default=0.0), max((p.mean for p in finite), default=1.0)
    to_x = _linear(thin[0].step if thin else 0, max(thin[-1].step, 1) if thin else 1, 2, width - 2)
    to_y = _axis(low, high, height - 3, 3, log=False)
    text = escape(label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'style="width:{width}px;height:{height}px" role="img" aria-label="{text}"><title>{text}</title>'
        f"{_mean_line([(to_x(p.step), to_y(p.mean)) for p in finite], 1.2)}</svg>"
    )


def thinned(points: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """At most `most` points: neighbours become one, with their mean, least, greatest, and all their NaN counted."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // most)
    return [_merged(points[i : i + size]) for i in range(0, len(points), size)]


def _merged(points: Sequence[CurvePoint]) -> CurvePoint:
    finite = [p for p in points if math.isfinite(p.mean)]
    wild = sum(p.wild for p in points)
    if not finite:
        return CurvePoint(points[0].step, math.nan, math.nan, math.nan, wild)
    mean = sum(p.mean for p in finite) / len(finite)
    return CurvePoint(points[0].step, mean, min(p.low for p in finite), max(p.high for p in finite), wild)


def y_range(points: Sequence[CurvePoint]) -> tuple[float, float, bool]:
    """Least and greatest value of the axis, and whether it is logarithmic.

    A spike of one rank may leave the picture, so that the mean still has most of the height.
    """
    if not points:
        return 0.0, 1.0, False
    low, high = min(p.mean for p in points), max(p.mean for p in points)
    if low > 0 and high / low > LOG_RATIO:
        return low / 1.2, high * 1.2, True
    room = high - low or abs(high) * 0.1 or 1.0
    low = max(min(p.low for p in points), low - room)
    high = min(max(p.high for p in points), high + room)
    margin = 0.04 * (high - low) or 0.5 * room
    return low - margin, high + margin, False


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values between `low` and `high`: a step of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    step = _tick_step(low, high, about)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_text(value: float, low: float, high: float, *, log: bool) -> str:
    """With as many decimals as neighbouring ticks need to differ."""
    if log or max(abs(low), abs(high)) >= 1e5 or high - low < 1e-4:
        return fmt.number(value)
    decimals = max(0, -math.floor(math.log10(_tick_step(low, high, 4)) + 1e-9))
    return f"{value:.{decimals}f}".replace("-", "−")


def _tick_step(low: float, high: float, about: int) -> float:
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (5, 2, 1) if step * power <= raw * 1.001)


def _step_text(step: float) -> str:
    """`400`, `2k`, `2.5k`, `1M`."""
    for factor, prefix in ((1e6, "M"), (1e3, "k")):
        if step >= factor:
            return f"{step / factor:g}{prefix}"
    return f"{step:g}"


def _log_ticks(low: float, high: float) -> list[float]:
    exponents = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [10.0**e for e in exponents][:: max(1, len(exponents) // 5)]


def _linear(a: float, b: float, start: float, end: float) -> Callable[[float], float]:
    scale = (end - start) / (b - a) if b > a else 0.0
    return lambda value: start + (value - a) * scale


def _axis(low: float, high: float, start: float, end: float, *, log: bool) -> Callable[[float], float]:
    if not high > low:
        return lambda _: (start + end) / 2
    if not log:
        return _linear(low, high, start, end)
    inner = _linear(math.log10(low), math.log10(high), start, end)
    return lambda value: inner(math.log10(value))


def _mean_line(at: Sequence[tuple[float, float]], stroke: float = 1.8) -> str:
    if not at:
        return ""
    if len(at) == 1:
        return f'<circle class="mean" cx="{at[0][0]:.1f}" cy="{at[0][1]:.1f}" r="2.5" fill="{BLUE}"/>'
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    return f'<path class="mean" d="M{path}" fill="none" stroke="{BLUE}" stroke-width="{stroke}"/>'
