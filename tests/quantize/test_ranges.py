"""Extremes and histograms against numpy over everything at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepool.quantize.ranges import BINS, Extremes, Histogram

parts = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@given(parts, st.integers(0, 2**32 - 1))
def test_extremes_of_parts_are_those_of_the_whole(sizes: list[int], seed: int) -> None:
    values = [np.random.default_rng(seed).standard_normal((n, 2, 5), np.float32) for n in sizes]
    seen = Extremes(5)
    assert all(seen.add(part) for part in values)
    whole = np.concatenate(values).reshape(-1, 5)
    np.testing.assert_array_equal(seen.lowest, whole.min(0))
    np.testing.assert_array_equal(seen.highest, whole.max(0))
    np.testing.assert_array_equal(seen.channels, np.abs(whole).max(0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_value_is_noticed(bad: float) -> None:
    values = np.zeros((3, 4), np.float32)
    values[1, 2] = bad
    assert not Extremes(4).add(values)


def test_a_histogram_has_a_fixed_size_and_counts_everything() -> None:
    values = np.random.default_rng(1).standard_normal((400, 8)).astype(np.float32)
    scale = np.linspace(0.5, 2, 8, dtype=np.float32)
    whole = np.abs(values / scale)
    histogram = Histogram(scale, float(whole.max()))
    for part in np.split(values, 10):
        histogram.add(part)
    assert histogram.counts.shape == (BINS,)
    assert abs(histogram.counts.sum() - whole.size) <= 2  # rounding at the last edge
    for share in (50.0, 90.0, 99.0):
        expected = np.percentile(whole, share)
        assert abs(histogram.percentile(share) - expected) <= 2 * histogram.largest / BINS


def test_entropy_cuts_a_lonely_outlier_and_keeps_an_even_range() -> None:
    random = np.random.default_rng(2)
    bell = Histogram(np.ones(1, np.float32), 100.0)
    bell.add(np.append(random.standard_normal(100_000), 100.0).astype(np.float32)[:, None])
    assert bell.entropy() < 50
    even = Histogram(np.ones(1, np.float32), 1.0)
    even.add(random.uniform(-1, 1, (100_000, 1)).astype(np.float32))
    assert even.entropy() > 0.9
