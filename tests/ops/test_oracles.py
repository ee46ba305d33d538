"""The definitions against loops that are written the way the text reads, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgepool import ops
from edgepool.ops.quantization import dequantize, quantize
from tests.ops.harness import Step, steps

PAGE, RATIO = 8, 4


def local_start(t: int, window: int, block_tokens: int) -> int:
    return max(0, math.floor((t + 1 - window) / block_tokens) * block_tokens)


def has_page(step: Step, b: int, token: int) -> bool:
    return bool(step.page_table[b, token // PAGE] != 0)


def softmax(x: list[float]) -> list[float]:
    top = max(x)
    e = [math.exp(v - top) for v in x]
    return [v / sum(e) for v in e]


# ------------------------------------------------------------------------------------- attention


def attended(step: Step, b: int, t: int, blocks: list[int], rules: dict[str, int]) -> list[int]:
    """The tokens that query t attends to, from the text of the operator."""
    sinks, window, block = rules["sinks"], rules["window"], rules["block_tokens"]
    if rules["select"]:
        tokens = set(range(sinks)) | set(range(local_start(t, window, block), t + 1))
        for i in blocks:
            tokens |= set(range(i * block, (i + 1) * block))
    else:
        tokens = set(range(sinks)) | set(range(t - window + 1, t + 1)) if window else range(t + 1)
    return sorted(x for x in tokens if 0 <= x <= t and has_page(step, b, x))


@pytest.mark.parametrize("select, window, sinks", [(1, 5, 4), (1, 0, 0), (0, 0, 0), (0, 6, 3)])
@given(data=st.data())
def test_attention(select: int, window: int, sinks: int, data: st.DataObject) -> None:
    step = data.draw(steps(PAGE, st.integers(1, 20)))
    rng, batch, length = step.rng, len(step.past_len), step.length
    kv_heads, group, dim, top = 2, 2, 4, 3
    rules = dict(window=window, sinks=sinks, block_tokens=4, select=select)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape))

    q, k, v = (normal(batch, length, h, dim) for h in (kv_heads * group, kv_heads, kv_heads))
    pools = [normal(step.pages, kv_heads, PAGE, dim) for _ in range(2)]
    for pool in pools:
        pool[0] = 0
    selected = torch.full((batch, length, kv_heads, top), -1, dtype=torch.int32)
    for b in range(batch):
        for s in range(int(step.new_len[b])):
            t = int(step.past_len[b]) + s
            allowed = range(sinks // 4, local_start(t, window, 4) // 4)
            allowed = [i for i in allowed if has_page(step, b, 4 * i)]
            for h in range(kv_heads):
                some = sorted(rng.choice(allowed, min(top, len(allowed)), replace=False))
                selected[b, s, h, : len(some)] = torch.tensor(some, dtype=torch.int32)
    one = torch.zeros(1)
    out, k_out, v_out, *_ = ops.shared_kv_attention(
        q, k, v, *pools, one, one, step.page_table, step.past_len, step.new_len,
        selected if select else torch.tensor([-1], dtype=torch.int32), scale=0.7, **rules,
    )  # fmt: skip

    stored = [pool.clone() for pool in pools]
    for b in range(batch):
        for s in range(int(step.new_len[b])):
            t = int(step.past_len[b]) + s
            if has_page(step, b, t):
                for pool, x in zip(stored, (k, v), strict=True):
                    pool[step.page_table[b, t // PAGE], :, t % PAGE] = x[b, s]
    assert torch.equal(k_out, stored[0]) and torch.equal(v_out, stored[1])

    expected = torch.zeros_like(q)
    for b in range(batch):
        for s in range(int(step.new_len[b])):
            for h in range(kv_heads * group):
                head = h // group
                blocks = [i for i in selected[b, s, head].tolist() if i >= 0]
                tokens = attended(step, b, int(step.past_len[b]) + s, blocks, rules)
                if tokens:
                    place = [(int(step.page_table[b, x // PAGE]), head, x % PAGE) for x in tokens]
                    weight = softmax([float(q[b, s, h] @ stored[0][p]) * 0.7 for p in place])
                    values = [w * stored[1][p] for w, p in zip(weight, place, strict=True)]
                    expected[b, s, h] = sum(values)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_unseen_values_have_no_effect() -> None:
    """Not even NaNs: a page can hold what another sequence left behind."""
    q = torch.randn(1, 1, 1, 4)
    pools = torch.randn(2, 3, 1, PAGE, 4)
    pools[:, 0] = 0
    table, past, new = (torch.tensor(x, dtype=torch.int32) for x in ([[2, 1]], [2], [1]))
    none, one = torch.tensor([-1], dtype=torch.int32), torch.zeros(1)
    arguments = (one, one, table, past, new, none, 0, 0, PAGE, 0.5, 0)
    clean = ops.shared_kv_read(q, *pools, *arguments)
    pools[:, 2, :, 3:] = torch.nan
    pools[:, 1] = torch.inf
    assert torch.equal(ops.shared_kv_read(q, *pools, *arguments), clean)


# --------------------------------------------------------------------------------------- pooling


def pooled(keys, gates, ape, fusion, weighting, post_norm, fuse, sparsity) -> np.ndarray:
    """One pool of one head: keys, gates, ape [ratio, Di] in float64."""
    ratio, dim = keys.shape
    if weighting == "gate":
        columns = [softmax((gates[:, c] + ape[:, c]).tolist()) for c in range(dim)]
        weight = np.array(columns).T
    elif weighting == "query":
        logits = [float(k @ gates[-1]) / math.sqrt(dim) + a[0] for k, a in zip(keys, ape)]
        weight = np.array(softmax(logits))[:, None].repeat(dim, 1)
    else:
        weight = np.full((ratio, dim), 1 / ratio)
    for c in range(dim):
        kept = [w if w >= sparsity else 0.0 for w in weight[:, c]]
        weight[:, c] = np.array(kept) / sum(kept)
    mixed = sum(weight[i] * keys[i] for i in range(ratio))
    if fuse:
        mixed = fusion @ mixed
    if post_norm == "l2":
        norm = sum(weight[i].mean() * np.linalg.norm(keys[i]) for i in range(ratio))
        mixed = mixed * norm / max(np.linalg.norm(mixed), 1e-12)
    return mixed


@pytest.mark.parametrize("weighting", ["mean", "gate", "query"])
@pytest.mark.parametrize("post_norm, fuse, sparsity", [("none", 0, 0.0), ("l2", 1, 0.2)])
@given(data=st.data())
def test_pooling(
    weighting: str, post_norm: str, fuse: int, sparsity: float, data: st.DataObject
) -> None:
    step = data.draw(steps(PAGE, st.integers(1, 20)))
    rng, batch, length, heads, dim = step.rng, len(step.past_len), step.length, 2, 3
    total = [int(p + n) for p, n in zip(step.past_len, step.new_len, strict=True)]
    history = [rng.standard_normal((2, n, heads, dim)) for n in total]  # all keys and gates
    if weighting == "mean":
        for x in history:
            x[1] = 0
    keys, gates = torch.randn(2, batch, length, heads, dim, dtype=torch.float64)
    tail = torch.zeros(batch, RATIO, 2, heads, dim, dtype=torch.float64)
    for b, past in enumerate(step.past_len.tolist()):
        for s in range(int(step.new_len[b])):
            keys[b, s], gates[b, s] = (torch.from_numpy(x[past + s]) for x in history[b])
        for i in range(past % RATIO):
            tail[b, i] = torch.from_numpy(history[b][:, past - past % RATIO + i])
    ape, fusion = rng.standard_normal((RATIO, heads, dim)), rng.standard_normal((heads, dim, dim))
    pool = torch.from_numpy(rng.standard_normal((heads, step.pages, PAGE // RATIO, dim)))
    pool[:, 0] = 0
    one = torch.zeros(1, dtype=torch.float64)
    learned = weighting != "mean"
    tail_out, pool_out, _ = ops.index_pool(
        keys, gates if learned else one, torch.from_numpy(ape) if learned else one,
        torch.from_numpy(fusion) if fuse else one, tail, pool, torch.zeros(1),
        step.page_table, step.past_len, step.new_len,
        RATIO, weighting, post_norm, fuse, sparsity,
    )  # fmt: skip

    expected_pool, expected_tail = pool.clone(), torch.zeros_like(tail)
    for b, past in enumerate(step.past_len.tolist()):
        for number in range(past // RATIO, total[b] // RATIO):
            page = step.page_table[b, number * RATIO // PAGE]
            if page == 0:
                continue
            members = history[b][:, number * RATIO : (number + 1) * RATIO]
            for h in range(heads):
                value = pooled(
                    *members[:, :, h], ape[:, h], fusion[h], weighting, post_norm, fuse, sparsity
                )
                expected_pool[h, page, number % (PAGE // RATIO)] = torch.from_numpy(value)
        for i in range(total[b] % RATIO):
            token = total[b] // RATIO * RATIO + i
            expected_tail[b, i] = torch.from_numpy(history[b][:, token])
    assert torch.equal(tail_out, expected_tail)
    torch.testing.assert_close(pool_out, expected_pool, rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------------- quantisation


def test_quantisation_rounds_half_to_even_and_keeps_the_rules() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5], [0.0] * 6])
    codes, scale = quantize(x)
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2], [0] * 6]
    assert scale.tolist() == [1.0, 0.0]


@given(seed=st.integers(0, 2**32), power=st.integers(-40, 30))
def test_quantisation_is_within_half_a_step(seed: int, power: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((7, 16)).astype(np.float32) * np.float32(2.0**power)
    codes, scale = quantize(torch.from_numpy(x))
    assert np.array_equal(scale.numpy(), np.abs(x).max(-1) / np.float32(127))
    assert np.array_equal(codes.numpy(), np.rint(x / scale.numpy()[:, None]).astype(np.int8))
    error = (dequantize(codes, scale, torch.float32) - torch.from_numpy(x)).abs()
    assert (error <= scale[:, None] * 0.501).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_vector_that_is_not_finite_reads_back_as_nan(bad: float) -> None:
    x = torch.randn(3, 8)
    x[1, 2] = bad
    codes, scale = quantize(x)
    assert not codes[1].any()
    assert dequantize(codes, scale, torch.float32).isnan().all(-1).tolist() == [False, True, False]
