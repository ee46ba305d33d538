"""The token budget: every choice of numbers gives a valid configuration or one clear line."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgepool.checkpoint import Retrofit
from edgepool.config import ModelConfig
from edgepool.errors import BadInput
from edgepool.ops.paging import local_start


def configure(retrofit: Retrofit) -> ModelConfig:
    return ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_context=100000,
        **retrofit.settings(2),
    )


def test_defaults() -> None:
    config = configure(Retrofit())
    assert config.layer_types == ("sparse", "sparse")
    assert (config.index.ratio, config.index.block, config.index.top_k) == (4, 4, 880)
    assert (config.window, config.sinks, config.page_size) == (128, 16, 16)
    assert (config.index.source, config.index.weighting) == ("keys", "mean")


def test_full_attention_needs_no_budget() -> None:
    config = configure(Retrofit(attention="full", budget=1, page_size=7, kv_dtype="int8"))
    assert config.layer_types == ("full", "full")
    assert (config.page_size, config.kv_dtype) == (7, "int8")


@pytest.mark.parametrize(
    ("options", "block", "top_k"),
    [
        (dict(ratio=8), 2, 880),
        (dict(page_size=64), 4, 880),  # sinks end inside a page: blocks of 16 tokens
        (dict(page_size=64, sinks=64), 16, 832),
        (dict(page_size=64, sinks=0, budget=512, window=100), 16, 448),
        (dict(budget=145), 4, 16),
        (dict(window=0, sinks=0, budget=100), 4, 112),
    ],
)
def test_blocks_and_budget(options: dict[str, int], block: int, top_k: int) -> None:
    index = configure(Retrofit(**options)).index
    assert (index.block, index.top_k) == (block, top_k)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(budget=144), "budget: 144 .* at least 145"),
        (dict(budget=-1), "budget: -1 is below 1"),
        (dict(window=-1), "window: -1 is below 0"),
        (dict(ratio=0), "ratio: 0 is below 1"),
        (dict(page_size=18), r"page_size: 18 is not a multiple of the ratio \(4\)"),
        (dict(sinks=6), r"sinks: 6 is not a multiple of the ratio \(4\)"),
        (dict(attention="dense"), "'dense' is neither sparse nor full"),
        (dict(kv_dtype="fp8"), "kv_dtype: 'fp8'"),
    ],
)
def test_faults_are_named(options: dict[str, object], expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        configure(Retrofit(**options))


@given(
    budget=st.integers(-5, 4096),
    window=st.integers(-2, 300),
    sinks=st.integers(-2, 80),
    page_size=st.integers(-1, 128),
    ratio=st.integers(-1, 20),
)
def test_attended_tokens_are_the_budget(
    budget: int, window: int, sinks: int, page_size: int, ratio: int
) -> None:
    retrofit = Retrofit("sparse", budget, window, sinks, page_size, ratio)
    try:
        config = configure(retrofit)
    except BadInput:
        return
    block = config.index.block_tokens
    last = int(local_start(torch.tensor(budget - 1), window, block))
    assert last - sinks <= config.index.top_k  # nothing of a context of `budget` tokens is left out
    assert budget <= config.attended_tokens(0, config.max_context) < budget + 2 * block
    assert config.page_size % config.index.block_tokens == 0
