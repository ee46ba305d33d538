"""Rounding with feedback: what it keeps of the outputs, against rounding to the nearest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepool.quantize import rounding
from edgepool.quantize.rounding import feedback_of, rounded


def problem(seed: int, channels: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Correlated inputs [n,C] of different sizes, and weights [C,O] in steps."""
    source = np.random.default_rng(seed)
    mixed = source.standard_normal((4 * channels, channels // 2 + 1))
    x = mixed @ source.standard_normal((channels // 2 + 1, channels))
    x += 0.1 * source.standard_normal(x.shape)
    x *= source.lognormal(0, 1, channels)
    weights = source.uniform(-127, 127, (channels, outputs))
    return x.astype(np.float32), weights.astype(np.float32)


def error(x: np.ndarray, weights: np.ndarray, whole: np.ndarray) -> float:
    return float(np.square(x @ (whole - weights)).sum())


@given(st.integers(0, 2**32 - 1), st.integers(8, 40), st.integers(1, 6))
def test_it_loses_less_than_the_nearest(seed: int, channels: int, outputs: int) -> None:
    x, weights = problem(seed, channels, outputs)
    whole = rounded(weights, *feedback_of(x.T @ x))
    assert whole.dtype == np.int8
    assert whole.shape == weights.shape
    assert np.abs(whole).max() <= 127
    assert error(x, weights, whole) < error(x, weights, np.rint(weights)) * 1.02


def test_it_loses_less_than_half_where_inputs_depend_on_each_other() -> None:
    x, weights = problem(0, 64, 32)
    whole = rounded(weights, *feedback_of(x.T @ x))
    assert error(x, weights, whole) < error(x, weights, np.rint(weights)) / 2


def test_the_size_of_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = problem(1, 50, 8)
    whole = rounded(weights, *feedback_of(x.T @ x))
    monkeypatch.setattr(rounding, "COLUMNS", 7)
    again = rounded(weights, *feedback_of(x.T @ x))
    assert (whole != again).mean() < 0.02  # sums in another order may fall to another side


@pytest.mark.parametrize("moments", [np.zeros((5, 5)), np.diag([1.0, 0, 4, 0, 0])])
def test_independent_or_silent_channels_are_rounded_to_the_nearest(moments: np.ndarray) -> None:
    weights = np.random.default_rng(2).uniform(-127, 127, (5, 3)).astype(np.float32)
    whole = rounded(weights, *feedback_of(moments.astype(np.float32)))
    np.testing.assert_array_equal(whole, np.rint(weights))
