"""Numbers with units, and sets of ranks."""

from __future__ import annotations

import math

import pytest

from ddl_magics.views import format as fmt
from ddl_magics.views.ranges import in_words, ranges


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.50 KiB"),
        (87.4e6, "83.4 MiB"),
        (40 * 2**30, "40.0 GiB"),
        (999.9 * 2**20, "1000 MiB"),
    ],
)
def test_bytes_have_three_digits(n, text):
    assert fmt.size(n) == text


@pytest.mark.parametrize(
    ("s", "text"),
    [
        (0.00085, "0.85 ms"),
        (0.012, "12 ms"),
        (0.66, "0.66 s"),
        (0.996, "1.0 s"),
        (45.2, "45 s"),
        (211, "3:31"),
        (math.nan, "–"),
    ],
)
def test_durations(s, text):
    assert fmt.duration(s) == text


@pytest.mark.parametrize(
    ("s", "text"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (183_900, "2 d 03:05"), (-1, "0:00")]
)
def test_clock(s, text):
    assert fmt.clock(s) == text


@pytest.mark.parametrize(
    ("x", "text"), [(950, "950"), (12_400, "12.4 k"), (999_600, "1.00 M"), (0.5, "0.50"), (2e9, "2.00 G")]
)
def test_rates(x, text):
    assert fmt.rate(x) == text


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (1.84249, "1.842"),
        (12345.6, "12346"),
        (2.8e-5, "2.8e−5"),
        (-0.5, "−0.500"),
        (0.01234, "0.0123"),
        (0, "0"),
        (math.nan, "NaN"),
        (-math.inf, "−inf"),
        (1e9, "1e9"),
    ],
)
def test_values_of_metrics(x, text):
    assert fmt.number(x) == text


def test_ranges_of_ranks():
    assert ranges([3, 2, 0, 2]) == "0,2-3"
    assert ranges([]) == ""
    assert ranges(range(512)) == "0-511"
    assert in_words([5]) == "rank 5"
    assert in_words([0, 1]) == "ranks 0-1"
