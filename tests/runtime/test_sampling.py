"""Sampling against the processors of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edgepool.errors import BadInput, GateFailed
from edgepool.runtime.sampling import Sampler, Sampling, distribution, penalised

VOCAB = 1000


def logits(seed: int, spread: float = 3.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.standard_normal(VOCAB) * spread).astype(np.float32)


def reference(values: np.ndarray, s: Sampling, seen: list[int]) -> np.ndarray:
    """Probabilities [vocab] after transformers' processors, in the order of its `generate`."""
    steps = LogitsProcessorList()
    if s.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    steps.append(TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        steps.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        steps.append(TopPLogitsWarper(s.top_p))
    scores = steps(torch.tensor([seen]), torch.from_numpy(values.astype(np.float64))[None])
    return torch.softmax(scores, -1)[0].numpy()


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.1, 3),
    top_k=st.sampled_from([0, 1, 5, 50, VOCAB, 5000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
)
@settings(max_examples=150, deadline=None)
def test_the_distribution_is_that_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, penalty: float
) -> None:
    s = Sampling(temperature, top_k, top_p, penalty)
    values, seen_ids = logits(seed), list(range(0, VOCAB, 7))
    seen = np.zeros(VOCAB, bool)
    seen[seen_ids] = True
    tokens, probabilities = distribution(penalised(values, seen, penalty), s)
    dense = np.zeros(VOCAB)
    dense[tokens] = probabilities
    expected = reference(values, s, seen_ids)
    assert (dense > 0).sum() == (expected > 0).sum()
    np.testing.assert_allclose(dense, expected, rtol=1e-5, atol=1e-12)


def test_top_p_keeps_at_least_one_and_orders_ties_by_token() -> None:
    tokens, probabilities = distribution(np.zeros(8, np.float32), Sampling(1.0, top_p=0.3))
    assert tokens.tolist() == [0, 1, 2]
    assert probabilities.sum() == pytest.approx(1)
    tokens, _ = distribution(logits(0), Sampling(1.0, top_p=1e-9))
    assert tokens.tolist() == [logits(0).argmax()]


def test_top_p_of_a_flat_distribution_looks_beyond_the_head() -> None:
    tokens, _ = distribution(np.zeros(VOCAB * 8, np.float32), Sampling(1.0, top_p=0.95))
    assert len(tokens) == 7600


def test_greedy_takes_the_largest_and_sees_it() -> None:
    values = np.array([1.0, 3.0, 2.9, -5.0], np.float32)
    sampler = Sampler(Sampling(repetition_penalty=1.5), 4)
    assert [sampler.draw(values) for _ in range(3)] == [1, 2, 1]


def test_the_prompt_counts_as_seen() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0), 4)
    sampler.see([1])
    assert sampler.draw(np.array([1.0, 3.0, 2.9, -5.0], np.float32)) == 2


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draws_follow_the_distribution(top_p: float) -> None:
    """Chi-square of 5,000 draws; 7 degrees of freedom, so 24.3 is exceeded once in a thousand."""
    settings_ = Sampling(0.9, top_k=8, top_p=top_p, seed=3)
    values = logits(5)
    tokens, probabilities = distribution(values, settings_)
    sampler = Sampler(settings_, VOCAB)
    draws = np.array([sampler.draw(values) for _ in range(5000)])
    counts = np.array([(draws == t).sum() for t in tokens])
    assert counts.sum() == 5000
    expected = probabilities * 5000
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_seeds() -> None:
    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed), VOCAB)
        return [sampler.draw(logits(i)) for i in range(20)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert draws(None) != draws(None)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    values = logits(1)
    tokens, probabilities = distribution(values, Sampling(temperature))
    assert probabilities.sum() == pytest.approx(1)
    assert (probabilities[tokens == values.argmax()] > 0.9) == (temperature < 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_refuses_logits_that_are_not_finite(bad: float) -> None:
    values = logits(1)
    values[3] = bad
    with pytest.raises(GateFailed, match="not finite"):
        Sampler(Sampling(), VOCAB).draw(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
    ],
)
def test_refuses_settings_out_of_range(name: str, value: float) -> None:
    with pytest.raises(BadInput, match=name):
        Sampling(**{name: value})
