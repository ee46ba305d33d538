"""The count of attended tokens, against the attended sets written out token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepool.config import IndexConfig
from edgepool.runtime.attended import attended_fraction, attended_tokens

from .fakes import config


def attended_set(kind: str, t: int, window: int, sinks: int, top_k: int, tokens: int) -> set[int]:
    """Positions that the query at t attends to; the selection takes the first candidates."""
    everything = set(range(t + 1))
    if kind == "full":
        return everything
    if kind == "window":
        return {p for p in everything if p < sinks or p > t - window}
    local_start = max(0, (t + 1 - window) // tokens * tokens)
    blocks = [b for b in range(t + 1) if b * tokens >= sinks and (b + 1) * tokens <= local_start]
    chosen = {b * tokens + i for b in blocks[: top_k // tokens] for i in range(tokens)}
    return {p for p in everything if p < sinks or p >= local_start} | chosen


@given(
    kind=st.sampled_from(["full", "window", "keypoints", "sparse"]),
    t=st.integers(0, 90),
    window=st.integers(1, 30),
    sink_blocks=st.integers(0, 3),
    top_blocks=st.integers(1, 5),
    block=st.sampled_from([1, 2]),
)
def test_counts_the_attended_set(
    kind: str, t: int, window: int, sink_blocks: int, top_blocks: int, block: int
) -> None:
    tokens = 4 * block
    c = config(
        layer_types=(kind, kind),
        window=window,
        sinks=sink_blocks * tokens,
        index=IndexConfig(block=block, top_k=top_blocks * tokens),
    )
    expected = attended_set(kind, t, window, c.sinks, c.index.top_k, tokens)
    assert attended_tokens(c, 0, [t]).tolist() == [len(expected)]
    assert len(expected) <= c.attended_tokens(0, t + 1)


def test_fraction_is_over_layers_and_queries() -> None:
    c = config(layer_types=("full", "window"), window=8, sinks=0)
    # queries 15 and 31: contexts 16 and 32, the window layer sees 8 of each
    assert attended_fraction(c, 15, 15) == pytest.approx((16 + 8) / 32)
    assert attended_fraction(c, 0, 7) == 1
