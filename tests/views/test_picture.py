"""The panel as HTML and text: what is drawn is what was sent."""

from __future__ import annotations

import math
import re
import time
import xml.etree.ElementTree as ET

import pytest

from ddl_magics.protocol import Outcome
from ddl_magics.telemetry.history import History, RankInfo, RunInfo
from ddl_magics.telemetry.series import CurvePoint
from ddl_magics.views import svg
from ddl_magics.views.memory import nice_scale
from ddl_magics.views.palette import KINDS
from ddl_magics.views.panel_html import panel_html
from ddl_magics.views.text import bar, panel_text, plain, sparkline, status_line
from tests.views.simulated import GIB, failed, history

pytestmark = pytest.mark.timeout(60)
SVG = "{http://www.w3.org/2000/svg}"
EVIL = '<script>alert("x")</script>&\'"\x1b[31m'


def parse(html):
    """The HTML as a tree: it is well-formed, so that no name can break out of its place."""
    return ET.fromstring(re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL))


def pictures(html):
    return list(parse(html).iter(f"{SVG}svg"))


def words(html):
    return " ".join(" ".join(parse(html).itertext()).split())


def widths(picture):
    return {r.get("class"): float(r.get("width")) for r in picture.iter(f"{SVG}rect") if r.get("class")}


@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_bars_are_as_long_as_the_memory_they_stand_for(ranks):
    view = history(ranks).view(1211.0)
    bars = [p for p in pictures(panel_html(view)) if widths(p)]
    assert len(bars) == ranks
    for picture, rank in zip(bars, view.ranks, strict=True):
        drawn = widths(picture)
        for kind, size in rank.memory.items():
            assert drawn[kind] == pytest.approx(svg.BAR_WIDTH * size / (40 * GIB), abs=0.01)
        starts = [float(r.get("x")) for r in picture.iter(f"{SVG}rect") if r.get("class")]
        assert starts == sorted(starts)
        assert starts[-1] + drawn["reserved"] == pytest.approx(svg.BAR_WIDTH * rank.total / (40 * GIB), abs=0.05)
        (peak,) = [p for p in picture.iter(f"{SVG}path") if p.get("class") == "peak"]
        at = float(peak.get("d")[1:].split()[0])
        assert at == pytest.approx(svg.BAR_WIDTH * rank.peak_total / (40 * GIB), abs=0.01)
        assert picture.get("aria-label").startswith(f"{rank.info.rank} ")
        assert picture.get("role") == "img"
        # Notebooks give every svg of an output `height: auto`, which would flatten a bar.
        assert f"height:{picture.get('height')}px" in picture.get("style")


@pytest.mark.parametrize("ranks", [17, 64, 512])
def test_many_ranks_are_least_mean_and_most(ranks):
    view = history(ranks, steps=20, per_node=8).view(1211.0)
    html = panel_html(view)
    bars = [p for p in pictures(html) if widths(p)]
    totals = [r.total for r in view.ranks]
    expected = [min(totals), sum(totals) / ranks, max(totals)]
    for picture, total in zip(bars, expected, strict=True):
        assert sum(widths(picture).values()) == pytest.approx(svg.BAR_WIDTH * total / (40 * GIB), abs=0.1)
    assert f"mean of {ranks}" in words(html)
    assert "highest peak: rank 2" in words(html)


@pytest.mark.parametrize("ranks", [1, 4, 16, 64, 512])
def test_a_picture_is_small_and_quick(ranks):
    metrics = ("loss", "lr", "grad_norm", *(f"metric {i}" for i in range(12)))
    view = history(ranks, steps=20, metrics=metrics, states={r: ("waiting", r, "x" * 500) for r in range(ranks)}).view(
        1060
    )
    began = time.process_time()
    html = panel_html(view)
    assert time.process_time() - began < 0.2
    assert len(html.encode()) <= 40_000
    assert len(panel_text(view)) < 6_000


def test_a_long_run_is_still_small():
    assert len(panel_html(history(16, steps=1500, total=1500).view(9000.0)).encode()) <= 40_000


def test_small_memory_of_a_big_machine_is_scaled_to_be_seen_and_says_so():
    view = history(2, share=(0.1, 0.1, 0.2, 0.3, 0), capacity=512 * GIB, device="cpu").view(1211.0)
    html = panel_html(view)
    longest = max(sum(widths(p).values()) for p in pictures(html) if widths(p))
    assert 0.4 * svg.BAR_WIDTH < longest <= svg.BAR_WIDTH
    assert "full bar: 1.00 GiB of 512 GiB" in words(html)
    assert "full bar: 1.00 GiB of 512 GiB" in panel_text(view)
    assert "reserved" not in words(html)


@pytest.mark.parametrize("size", [1, 1000, 3e6, 0.9 * GIB, 1.5 * GIB, 26 * GIB, 1e15])
def test_scales_hold_the_largest_bar_and_leave_it_half_the_room(size):
    assert size <= nice_scale(size) <= 2 * size
    assert nice_scale(1.1 * GIB) == 1.5 * GIB
    assert nice_scale(0) == 0


def test_the_curve_runs_through_the_means_within_the_band():
    points = [CurvePoint(s, 4 - s / 50, 3.9 - s / 50, 4.2 - s / 50) for s in range(100)]
    root = ET.fromstring(svg.curve(points, "loss", 200))
    paths = {p.get("class"): p.get("d") for p in root.iter(f"{SVG}path") if p.get("class")}
    at = [tuple(map(float, pair.split())) for pair in paths["mean"][1:].split("L")]
    assert len(at) == 100
    xs, ys = zip(*at, strict=True)
    assert xs[-1] - xs[0] == pytest.approx((450 - 56) * 99 / 200, abs=0.2)
    slope = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in range(0, 99, 20)]
    assert max(slope) - min(slope) < 0.1
    assert min(slope) > 0
    band = [tuple(map(float, pair.split())) for pair in paths["band"][1:-1].split("L")]
    assert len(band) == 200
    assert all(band[i][1] < at[i][1] < band[199 - i][1] for i in range(100))


def test_a_curve_of_any_values_is_drawn():
    for values in (
        [],
        [math.nan],
        [1.0],
        [0.0, 0.0],
        [1e-9, 1e9],
        [-5.0, 5.0],
        [math.nan, 2.0, math.nan],
        [1e300, -1e300],
    ):
        points = [CurvePoint(s, v, v, v, int(math.isnan(v))) for s, v in enumerate(values)]
        for markup in (svg.curve(points, "x"), svg.spark(points, "x")):
            ET.fromstring(markup)
            assert "nan" not in markup.replace("NaN", "")
            assert "inf" not in markup


def test_thinning_keeps_extremes_and_nan():
    points = [CurvePoint(s, 1.0, 0.0 if s == 700 else 1.0, 9.0 if s == 800 else 1.0, int(s == 5)) for s in range(1000)]
    thin = svg.thinned(points, 100)
    assert len(thin) == 100
    assert (min(p.low for p in thin), max(p.high for p in thin), sum(p.wild for p in thin)) == (0.0, 9.0, 1)


def test_nan_is_marked_in_the_curve_and_in_words():
    view = history(nan_at=(100, 319)).view(1211.0)
    html = panel_html(view)
    marks = [p for picture in pictures(html) for p in picture.iter(f"{SVG}path") if p.get("class") == "wild"]
    assert len(marks) == 2
    assert "loss was NaN or infinite 8 times, first at step 100" in words(html)
    assert "NaN" in words(html).split("Loss")[1].split()[0:9]
    assert "loss NaN" in panel_text(view)


def test_hostile_names_stay_text():
    view = history(
        name=EVIL,
        strategy=EVIL,
        host=EVIL + "{node}",
        metrics=("loss", EVIL),
        notes=(EVIL,),
        states=dict.fromkeys(range(4), ("waiting", 1, EVIL)),
        finish=[Outcome(0, "error", 1.0, EVIL, EVIL)],
    ).view(1211.0)
    html = panel_html(view).replace("\x1b", "")
    assert "<script" not in html
    assert len(parse(html).findall(".//script")) == 0
    assert '<script>alert("x")</script>' in words(html)


def test_the_picture_stands_alone_and_takes_its_colours_from_the_page():
    html = panel_html(history(finish=failed()).view())
    for forbidden in ("<script", "<link", "<img", "@import", "url(", "src=", "href=", "onload", "javascript:"):
        assert forbidden not in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"color:\s*(black|white|#000|#fff)", html)
    for colour, name, _ in KINDS.values():
        assert colour in html
        assert name in html


def test_header_says_what_runs_and_how_far_it_is():
    text = words(panel_html(history().view(1211.0)))
    for part in ("zero:3", "fine-tune 2", "4 ranks on 2 nodes (n1, n2)", "bf16-mixed", "global batch 32 = 4 × 8"):
        assert part in text
    assert "step 320 of 500 · 12.4 k tokens/s · 0.66 s a step (rank 2 slowest, 0.71 s) · 3:31 elapsed" in text
    assert "1:59 to go" in text
    (progress,) = [e for e in parse(panel_html(history().view(1211.0))).iter() if e.get("role") == "progressbar"]
    assert progress.get("aria-valuenow") == "64"


def test_states_are_grouped():
    waits = dict.fromkeys((0, 1, 3), ("waiting", 9, "ddl.backward(loss)"))
    view = history(states={**waits, 2: ("running", 7, "batch = augment(batch)")}).view(1211.0)
    for text in (words(panel_html(view)), " ".join(panel_text(view).split())):
        assert re.search(r"ranks 0-1,3 wait 3:31 cell line 9:\s+ddl.backward\(loss\)", text)
        assert re.search(r"rank 2 runs cell line 7:\s+batch = augment\(batch\)", text)


def test_the_end_says_who_failed_and_who_was_released():
    view = history(finish=failed()).view(5000.0)
    text = words(panel_html(view))
    assert "rank 1 failed after 3:31" in text
    assert "rank 1 failed: ValueError: odd batch cell line 7" in text
    assert "ranks 0,2-3 released" in text
    in_vain = [Outcome(0, "released"), *(Outcome(r, "ok") for r in (1, 2, 3))]
    assert "rank 0 released after 3:31" in words(panel_html(history(finish=in_vain).view(5000.0)))
    assert "finished in" in words(panel_html(history(finish=[Outcome(r, "ok") for r in range(4)]).view()))


def test_a_run_without_any_record_is_drawn():
    view = History(RunInfo("r", "n", "ddp", 2, started=1.0), [RankInfo(0), RankInfo(1)]).view(4.0)
    assert "no record yet" in words(panel_html(view))
    assert "no record yet" in panel_text(view)
    assert status_line(view)


def test_text_bars_round_each_boundary_on_its_own():
    kinds = dict.fromkeys(KINDS, 1.0)
    line = plain([bar(kinds, 8.0, 7.0, width=40)])
    assert line == "PPPPPGGGGGOOOOOAAAAArrrrr··········|····"
    assert plain([bar({"parameters": 1.0}, 0.0, width=5)]) == "·····"
    assert len(plain([bar(kinds, 1.0, 9.0, width=20)])) == 20


def test_sparkline_marks_nan():
    points = [CurvePoint(s, v, v, v) for s, v in enumerate([2.0, math.nan, 1.0])]
    assert sparkline(points) == "█×▁"
