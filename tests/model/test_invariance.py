"""Chunking, batching and rollback never change what the model says.

The reference is the same model fed in one shot, batch of one. Sizes are small so that a prompt
spans many pages, closed pools, sinks, window and selection.
"""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgepool.config import IndexConfig, ModelConfig
from edgepool.model import Cache, Model

PAGE = 8
LENGTH = 61  # seven whole pages and an open pool
KEYS = IndexConfig(source="keys", ratio=4, block=1, top_k=16)
LEARNED = IndexConfig(
    source="learned", heads=3, dim=8, ratio=4, weighting="gate", block=2, top_k=16, fusion=True
)


def tiny(index: IndexConfig, **changes) -> ModelConfig:
    return ModelConfig(
        **{
            **dict(
                vocab_size=50,
                hidden_size=32,
                intermediate_size=48,
                num_layers=2,
                num_heads=4,
                num_kv_heads=2,
                head_dim=8,
                max_context=128,
                layer_types=("sparse",) * 2,
                index=index,
                window=8,
                sinks=8,
                page_size=PAGE,
            ),
            **changes,
        }
    )


CONFIGS = {
    "keys": tiny(KEYS),
    "keys-query": tiny(dataclasses.replace(KEYS, weighting="query", post_norm="l2")),
    "keys-int8": tiny(KEYS, kv_dtype="int8"),
    "learned": tiny(LEARNED),
    "learned-int8": tiny(LEARNED, kv_dtype="int8", qk_norm=True, qkv_bias=True),
    "mixed": tiny(
        dataclasses.replace(LEARNED, share=(0, 1, 2, 2)),
        num_layers=4,
        layer_types=("window", "keypoints", "sparse", "sparse"),
    ),
    "donors": tiny(
        KEYS,
        num_layers=4,
        layer_types=("full", "full", "sparse", "sparse"),
        kv_donor=(0, 0, 2, 2),
        kv_dtype="int8",
    ),
}


def build(config: ModelConfig) -> Model:
    torch.manual_seed(0)
    model = Model(config).requires_grad_(False).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 or name.endswith("ape"):
            weight.normal_(0, weight.shape[-1] ** -0.5)
    return model


MODELS = {name: build(config) for name, config in CONFIGS.items()}
PROMPTS = torch.randint(0, 50, (3, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()


def one_shot(model: Model, ids: list[int]) -> torch.Tensor:
    return Cache.allocate(model, 1, LENGTH).step([ids])[0]


REFERENCE = {name: [one_shot(m, ids) for ids in PROMPTS] for name, m in MODELS.items()}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@pytest.mark.parametrize("name", MODELS)
@given(splits=lengths)
def test_any_chunking_gives_the_same_logits(name, splits):
    cache = Cache.allocate(MODELS[name], 1, LENGTH)
    at = 0
    while at < LENGTH:
        chunk = splits.pop() if splits else LENGTH
        got = cache.step([PROMPTS[0][at : at + chunk]])[0]
        close(got, REFERENCE[name][0][at : at + chunk])
        at += chunk


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_gives_the_same_logits(name):
    cache = Cache.allocate(MODELS[name], 1, LENGTH)
    got = torch.cat([cache.step([[token]])[0] for token in PROMPTS[0]])
    close(got, REFERENCE[name][0])


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
def test_ragged_batches_on_scattered_pages_give_the_same_logits(name, data):
    cache = Cache.allocate(MODELS[name], 3, LENGTH)
    order = data.draw(st.permutations(range(cache.page_table.numel())))
    cache.page_table = cache.page_table.flatten()[torch.tensor(order)].view_as(cache.page_table)
    at = [0, 0, 0]
    while min(at) < LENGTH:
        sizes = [data.draw(st.integers(0, min(30, LENGTH - a))) for a in at]
        if not any(sizes):
            sizes = [min(1, LENGTH - a) for a in at]
        logits = cache.step([ids[a : a + n] for ids, a, n in zip(PROMPTS, at, sizes)])
        for b, n in enumerate(sizes):
            close(logits[b, :n], REFERENCE[name][b][at[b] : at[b] + n])
            at[b] += n


@pytest.mark.parametrize("name", MODELS)
def test_rollback_of_any_length_and_replay_gives_the_same_logits(name):
    model = MODELS[name]
    for back in range(3 * PAGE + 1):
        cache = Cache.allocate(model, 1, LENGTH)
        cache.step([PROMPTS[0]])
        cache.rollback([LENGTH - back])
        if back:
            got = cache.step([PROMPTS[0][LENGTH - back :]])[0]
            close(got, REFERENCE[name][0][LENGTH - back :])
        assert cache.ids[0] == PROMPTS[0]


@pytest.mark.parametrize("name", MODELS)
def test_other_tokens_after_a_rollback_leave_no_trace(name):
    """A draft that is rolled back must not be seen by what replaces it."""
    model = MODELS[name]
    for back in (1, 3, 5, PAGE, 2 * PAGE + 3):
        cache = Cache.allocate(model, 1, LENGTH)
        keep = LENGTH - back
        cache.step([PROMPTS[0][:keep] + PROMPTS[1][:back]])
        cache.rollback([keep])
        close(cache.step([PROMPTS[0][keep:]])[0], REFERENCE[name][0][keep:])


@pytest.mark.parametrize("name", list(MODELS))
def test_a_closed_pool_never_changes(name):
    model = MODELS[name]
    cache = Cache.allocate(model, 1, LENGTH)
    layer = max(i for i in range(model.config.num_layers) if model.config.owns_index(i))
    at = model.state_names.index(f"index_pool.{layer}")
    before = None
    for i, token in enumerate(PROMPTS[0]):
        cache.step([[token]])
        pools = cache.state[at][:, 1:].flatten(1, 2).clone()
        closed = (i + 1) // 4
        if before is not None:
            assert torch.equal(pools[:, : i // 4], before[:, : i // 4])
        assert not pools[:, closed:].any()
        before = pools
