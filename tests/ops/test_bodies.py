"""The function bodies on ONNX Runtime are the PyTorch definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgepool.ops.attach import FORMS
from edgepool.ops.index_pool_select import block_scores
from tests.ops.harness import Site, Step, random_inputs, reference, run, steps

lengths = st.one_of(st.just(1), st.integers(2, 8), st.integers(9, 70), st.just(200))
forms = pytest.mark.parametrize("form", FORMS)


def values(**items: int | float | str) -> tuple[tuple[str, int | float | str], ...]:
    return tuple(items.items())


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within 1e-5; half types within two units in the last place."""
    limit = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found.double(), expected.double(), rtol=limit, atol=limit)


# ------------------------------------------------------------------------------------- IndexPool


def pool_site(weighting, unused=(), activation=torch.float32, storage=torch.float32, **changes):
    sizes = {"Hs": 2, "Di": 8, "U": 4, "ratio": 4, "fuse": 0, "post_norm": "none"}
    sizes.update({"weighting": weighting, "weight_sparsity": 0.0, **changes})
    absent = {"fusion"} - ({"fusion"} if sizes["fuse"] else set())
    absent |= {"gates", "ape"} if weighting == "mean" else set()
    absent |= {"index_scale"} if storage != torch.int8 else set()
    return Site("IndexPool", values(**sizes), activation, storage, tuple(sorted(absent)))


HALF, INT8 = torch.float16, torch.int8
POOL_SITES = {
    "mean": pool_site("mean"),
    "mean int8": pool_site("mean", storage=INT8, U=2),
    "mean l2": pool_site("mean", post_norm="l2"),
    "gate": pool_site("gate", Hs=1, ratio=5, U=3),
    "gate fused sparse l2": pool_site("gate", fuse=1, post_norm="l2", weight_sparsity=0.15),
    "query int8": pool_site("query", storage=INT8, post_norm="l2"),
    "query half": pool_site("query", activation=HALF, storage=HALF, weight_sparsity=0.1),
    "gate half int8": pool_site("gate", activation=HALF, storage=INT8, fuse=1),
    "ratio 1": pool_site("query", ratio=1, U=4),
}


@forms
@pytest.mark.parametrize("case", POOL_SITES)
@given(data=st.data())
def test_index_pool(case: str, form: str, data: st.DataObject) -> None:
    site = POOL_SITES[case]
    step = data.draw(steps(site["U"] * site["ratio"], lengths))
    inputs = random_inputs(site, step)
    opened = step.past_len % site["ratio"]  # the rest of the tail is zero, as the contract says
    for b, n in enumerate(opened.tolist()):
        inputs["tail"][b, n:] = 0
        if site["weighting"] == "mean":
            inputs["tail"][b, :, 1] = 0
    tail, pool, scale = run(site, form, inputs)
    expected_tail, expected_pool, expected_scale = reference(site, inputs)
    assert torch.equal(tail, expected_tail)
    assert not pool[:, 0].any()
    if site.storage == torch.int8:
        torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=1e-7)
        assert (pool.int() - expected_pool.int()).abs().max() <= 1  # a half rounds either way
    else:
        close(pool, expected_pool, site.storage)


# ------------------------------------------------------------------------------- IndexPoolSelect


def select_site(scoring, activation=torch.float32, storage=torch.float32, **changes):
    sizes = {"Hs": 3, "Hq": 3, "Di": 8, "U": 4, "k": 3, "block": 4, "ratio": 4}
    sizes.update(scoring=scoring, window=20, sinks=16)
    sizes.update(changes)
    absent = {"w"} if scoring == "softmax" else set()
    absent |= {"index_scale"} if storage != torch.int8 else set()
    return Site("IndexPoolSelect", values(**sizes), activation, storage, tuple(sorted(absent)))


SELECT_SITES = {
    "softmax": select_site("softmax"),
    "softmax int8": select_site("softmax", storage=INT8, block=2, k=5, sinks=8),
    "softmax half": select_site("softmax", activation=HALF, storage=HALF, k=20),
    "softmax, no window": select_site("softmax", window=0, sinks=0, block=1, k=7),
    "relu": select_site("relu", Hs=1, Hq=5, block=1, k=6, sinks=4),
    "relu int8, no window": select_site("relu", storage=INT8, window=0, sinks=0, block=1, k=4),
    "relu half int8": select_site("relu", activation=HALF, storage=INT8, U=8, block=2, sinks=0),
    "ratio 1": select_site("softmax", ratio=1, block=2, window=3, sinks=2, k=2),
}


def chosen_by_score(site: Site, scores: torch.Tensor, selected: torch.Tensor) -> None:
    """Distinct candidates in ascending order, as many as can be, and none better left out."""
    count = (scores > -torch.inf).sum(-1).clamp(max=site["k"])
    present = selected >= 0
    assert torch.equal(present.sum(-1), count)
    assert (present[..., :-1] | ~present[..., 1:]).all()  # -1 only at the end
    assert ((selected[..., 1:] > selected[..., :-1]) | ~present[..., 1:]).all()
    padded = torch.nn.functional.pad(scores, (0, 1), value=torch.inf)
    picked = padded.gather(-1, selected.long() % padded.shape[-1])  # -1: infinity
    left = padded.scatter(-1, selected.long() % padded.shape[-1], -torch.inf)[..., :-1]
    worst, best = picked.amin(-1), left.amax(-1)
    full = count == site["k"]
    assert (worst >= best - rounding(site, best))[full].all()


def rounding(site: Site, score: torch.Tensor) -> torch.Tensor:
    """By how much two ways to compute a score may differ."""
    return (1e-5 if site.activation == torch.float32 else 1e-3) * score.abs().clamp(min=1)


@forms
@pytest.mark.parametrize("case", SELECT_SITES)
@given(data=st.data())
def test_index_pool_select(case: str, form: str, data: st.DataObject) -> None:
    """Equal to the definition, but where the last chosen and the first left out nearly tie."""
    site = SELECT_SITES[case]
    step = data.draw(steps(site["U"] * site["ratio"], lengths))
    inputs = random_inputs(site, step)
    rules = {k: v for k, v in site.attributes.items() if k != "k"}
    scores = block_scores(*inputs.values(), **rules)
    (selected,), (expected,) = run(site, form, inputs), reference(site, inputs)
    chosen_by_score(site, scores, selected)
    chosen_by_score(site, scores, expected)
    ranked = torch.nn.functional.pad(scores, (0, site["k"] + 1), value=-torch.inf)
    ranked = ranked.sort(-1, descending=True).values
    last, next_best = ranked[..., site["k"] - 1], ranked[..., site["k"]]
    clear = (next_best == -torch.inf) | (last - next_best > 2 * rounding(site, next_best))
    assert torch.equal(selected[clear], expected[clear])


@forms
@given(step=steps(16, lengths))
def test_ties_go_to_the_lower_block(form: str, step: Step) -> None:
    """Queries of zeros make every score equal, whatever is stored and wherever it is."""
    for scoring in ("softmax", "relu"):
        site = select_site(scoring, block=1, k=4, window=0, sinks=0)
        inputs = random_inputs(site, step)
        inputs["q"].zero_()
        (selected,) = run(site, form, inputs)
        assert torch.equal(selected, reference(site, inputs)[0])


@forms
@pytest.mark.parametrize("holes", (False, True))
@pytest.mark.parametrize("length", (1, 2))
def test_contexts_whose_every_block_is_chosen_and_the_next(
    form: str, length: int, holes: bool
) -> None:
    """Token by token over the context at which a score decides for the first time."""
    site = select_site("relu", Hs=2, Hq=1, block=2, k=3, window=5, sinks=8, U=4)
    table = torch.tensor([[3, 1, 5, 2], [7, 4, 8, 6]], dtype=torch.int32)
    if holes:
        table[0, 1] = table[1, 0] = 0
    for past in range(64 - length):
        lengths = torch.tensor([past, max(0, past - 9)], dtype=torch.int32)
        new = torch.tensor([length, past % (length + 1)], dtype=torch.int32)
        step = Step(np.random.default_rng(past), table, lengths, new, length, 9)
        inputs = random_inputs(site, step)
        assert torch.equal(run(site, form, inputs)[0], reference(site, inputs)[0]), past


# ------------------------------------------------------------- SharedKVAttention and SharedKVRead


def attention_site(select, activation=torch.float32, storage=torch.float32, **changes):
    sizes = {"H": 6, "D": 8, "Hkv": 3, "T": 16, "Hs": 3, "K": 3, "block_tokens": 16}
    sizes.update(scale=8**-0.5, select=select, window=20, sinks=16)
    sizes.update(changes)
    absent = set() if select else {"selected"}
    absent |= {"k_scale", "v_scale"} if storage != torch.int8 else set()
    return Site("SharedKVAttention", values(**sizes), activation, storage, tuple(sorted(absent)))


ATTENTION_SITES = {
    "sparse": attention_site(1),
    "sparse int8, small blocks": attention_site(1, storage=INT8, block_tokens=4, sinks=8, K=6),
    "sparse half, shared heads": attention_site(1, activation=HALF, storage=HALF, Hs=1),
    "sparse half int8": attention_site(1, activation=HALF, storage=INT8, block_tokens=8),
    "no window": attention_site(1, window=0, sinks=0, block_tokens=4, Hs=1, K=9),
    "tokens": attention_site(1, window=1, sinks=3, block_tokens=1, T=4),
    "nothing but selected": attention_site(1, window=0, sinks=0, block_tokens=1, T=4),
    "full": attention_site(0, window=0, H=3),
    "full int8": attention_site(0, window=0, storage=INT8),
    "window": attention_site(0, window=7, sinks=3),
    "window int8": attention_site(0, window=40, sinks=0, storage=INT8),
}


def select_blocks(site: Site, step: Step, inputs: dict[str, torch.Tensor]) -> None:
    """A random legal selection: what IndexPoolSelect might have given."""
    block_tokens, per_page = site["block_tokens"], site["T"] // site["block_tokens"]
    selected = torch.full_like(inputs["selected"], -1)
    for b, (past, new) in enumerate(zip(step.past_len.tolist(), step.new_len.tolist())):
        for s in range(new):
            local = max(0, (past + s + 1 - site["window"]) // block_tokens)
            allowed = [
                i
                for i in range(-(-site["sinks"] // block_tokens), local)
                if step.page_table[b, i // per_page] > 0
            ]
            for h in range(site["Hs"]):
                count = int(step.rng.integers(0, min(site["K"], len(allowed)) + 1))
                some = sorted(step.rng.choice(allowed, count, replace=False)) if count else []
                selected[b, s, h, :count] = torch.tensor(some, dtype=torch.int32)
    inputs["selected"] = selected


@forms
@pytest.mark.parametrize("case", ATTENTION_SITES)
@given(data=st.data())
def test_shared_kv_attention(case: str, form: str, data: st.DataObject) -> None:
    site = ATTENTION_SITES[case]
    step = data.draw(steps(site["T"], lengths))
    inputs = random_inputs(site, step)
    if site["select"]:
        select_blocks(site, step, inputs)
    found, expected = run(site, form, inputs), reference(site, inputs)
    close(found[0], expected[0], site.activation)
    for state, same in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(state, same)
    assert not found[1][0].any() and not found[2][0].any()  # the null page
    for b, new in enumerate(step.new_len.tolist()):
        assert not found[0][b, new:].any()


@forms
@pytest.mark.parametrize("case", ["sparse", "sparse int8, small blocks", "full", "window"])
@given(data=st.data())
def test_shared_kv_read(case: str, form: str, data: st.DataObject) -> None:
    donor = ATTENTION_SITES[case]
    site = Site("SharedKVRead", donor.values, donor.activation, donor.storage, donor.unused)
    step = data.draw(steps(site["T"], lengths))
    inputs = random_inputs(site, step)
    if site["select"]:
        select_blocks(site, step, inputs)
    close(run(site, form, inputs)[0], reference(site, inputs)[0], site.activation)
