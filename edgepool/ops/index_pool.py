"""IndexPool: pool every `ratio` index keys of a sequence into one vector, as the pools close.

The pooled index is what a decode step scans in place of the keys: it is `ratio` times smaller. Only
pools that close in a step are written and a stored pool never changes; the members of the open pool
wait in `tail`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import quantization
from .body import INT8, INT64, Body
from .paging import compute_dtype, physical_pages
from .pieces import as_float, as_stored, quantize, slots, written_rows
from .registry import PAGING, Argument, Attribute, Operator, Site, register

WEIGHTINGS = ("mean", "gate", "query")
POST_NORMS = ("none", "l2")


@torch.library.custom_op("edgepool::index_pool", mutates_args=())
def index_pool(
    keys: Tensor,
    gates: Tensor,
    ape: Tensor,
    fusion: Tensor,
    tail: Tensor,
    index_pool: Tensor,
    index_scale: Tensor,
    page_table: Tensor,
    past_len: Tensor,
    new_len: Tensor,
    ratio: int,
    weighting: str,
    post_norm: str,
    fuse: int,
    weight_sparsity: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pool the new keys of each sequence; return (tail', index_pool', index_scale').

    keys         T [B, S, Hs, Di]        new index keys; rows at or after new_len are padding
    gates        T [B, S, Hs, Di]        `gate`: gate logits; `query`: the queries; `mean`: T [1]
    ape          T [ratio, Hs, Di]       added to the logits by place in the pool; `mean`: T [1]
    fusion       T [Hs, Di, Di]          matrix applied to a pooled key; fuse = 0: T [1]
    tail         T [B, ratio, 2, Hs, Di] keys and gates of the open pool, by place; rest zero
    index_pool   T or int8 [Hs, NP, T/ratio, Di]    pooled keys of all pages
    index_scale  float32 [Hs, NP, T/ratio]          scales of int8 storage; otherwise [1]
    page_table   int32 [B, MP], past_len int32 [B], new_len int32 [B]

    T is float32 or float16, computed in float32 (float64 for float64 oracles).

    weighting  `gate`: a[i, c] = softmax_i(gates[i, c] + ape[i, c]), GLM-5.3-Flash's k-pool;
               `query`: a[i] = softmax_i(<k_i, q_last> / sqrt(Di) + ape[i, h, 0]), q_last the gates
               of the pool's last token; `mean`: a[i] = 1 / ratio.
    weight_sparsity  below 1 / ratio: weights under it become 0 and the others are renormalised.
    """
    batch = keys.shape[0]
    pools_per_page = index_pool.shape[2]
    tail_out = torch.zeros_like(tail)
    pool_out, scale_out = index_pool.clone(), index_scale.clone()
    for b in range(batch):
        past, new = int(past_len[b]), int(new_len[b])
        fresh = tail.new_zeros(new, *tail.shape[2:])  # [new, 2, Hs, Di]
        fresh[:, 0] = keys[b, :new]
        if weighting != "mean":
            fresh[:, 1] = gates[b, :new]
        tokens = torch.cat([tail[b, : past % ratio], fresh])  # the open pool and what follows
        closed = tokens.shape[0] // ratio
        rest = tokens[closed * ratio :]
        tail_out[b, : rest.shape[0]] = rest

        members = tokens[: closed * ratio].unflatten(0, (closed, ratio))
        pooled = _pool(
            members[:, :, 0],
            members[:, :, 1],
            ape,
            fusion,
            weighting,
            post_norm,
            fuse,
            weight_sparsity,
        )
        number = past // ratio + torch.arange(closed, device=keys.device)
        page = physical_pages(page_table[b], number // pools_per_page)
        written = page != 0
        page, slot = page[written], (number % pools_per_page)[written]
        pooled = pooled[written].transpose(0, 1)  # [Hs, written, Di]
        if index_pool.dtype == torch.int8:
            pool_out[:, page, slot], scale_out[:, page, slot] = quantization.quantize(pooled)
        else:
            pool_out[:, page, slot] = pooled.to(index_pool.dtype)
    return tail_out, pool_out, scale_out


def _pool(
    keys: Tensor,
    gates: Tensor,
    ape: Tensor,
    fusion: Tensor,
    weighting: str,
    post_norm: str,
    fuse: int,
    weight_sparsity: float,
) -> Tensor:
    """Pooled keys [P, Hs, Di] of P whole pools: keys, gates [P, ratio, Hs, Di]."""
    dtype = compute_dtype(keys.dtype)
    keys, gates = keys.to(dtype), gates.to(dtype)
    ratio, dim = keys.shape[1], keys.shape[-1]
    if weighting == "gate":
        weight = torch.softmax(gates + ape.to(dtype), 1)  # [P, ratio, Hs, Di]
    elif weighting == "query":
        affinity = (keys * gates[:, -1:]).sum(-1) / dim**0.5
        weight = torch.softmax(affinity + ape[..., 0].to(dtype), 1)[..., None]  # [P, ratio, Hs, 1]
    else:
        weight = keys.new_full((1, ratio, 1, 1), 1 / ratio)
    if weight_sparsity > 0:
        weight = torch.where(weight < weight_sparsity, 0, weight)
        weight = weight / weight.sum(1, keepdim=True)
    pooled = (weight * keys).sum(1)
    if fuse:
        pooled = torch.einsum("hij,phj->phi", fusion.to(dtype), pooled)
    if post_norm == "l2":
        norm = (weight.mean(-1) * keys.norm(dim=-1)).sum(1)  # [P, Hs]
        pooled = pooled * (norm / pooled.norm(dim=-1).clamp(min=1e-12))[..., None]
    return pooled


@index_pool.register_fake
def _(keys, gates, ape, fusion, tail, index_pool, index_scale, *_):  # type: ignore[no-untyped-def]
    return (
        torch.empty_like(tail),
        torch.empty_like(index_pool),
        torch.empty_like(index_scale),
    )


def _body(b: Body, site: Site, form: str) -> Sequence[str]:
    ratio, heads = site["ratio"], site["Hs"]
    opened = b.unsqueeze(b.Mod("past_len", ratio), 1)  # tokens in the open pool, [B, 1]
    total = b.Add(opened, b.unsqueeze("new_len", 1))
    pools = b.range(b.Div(b.Add(written_rows(b, "keys", form), ratio - 1), ratio))
    number = b.Add(b.unsqueeze(b.Div("past_len", ratio), 1), pools)
    closes = b.Less(pools, b.Div(total, ratio))
    index, stored = slots(b, number, closes, site["U"], heads, head_axis=0)

    # The open pool, a row of zeros, the new tokens: [B, ratio + 1 + S, 2, Hs, Di].
    new = b.unsqueeze("keys", 2)
    if site["weighting"] == "mean":
        new = b.Pad(new, [0, 1, 0, 0, 0, 0, 0, 1, 0, 0])  # gates are zeros too
    else:
        new = b.Pad(b.Concat(new, b.unsqueeze("gates", 2), axis=2), [0, 1] + [0] * 8)
    tokens = b.Concat("tail", new, axis=1)

    def rows(token: str, exists: str, opened: str) -> str:
        """Where a token, counted from the first of the open pool, is among `tokens`."""
        row = b.Where(b.Less(token, opened), token, b.Add(token, b.Sub(ratio + 1, opened)))
        return b.unsqueeze(b.cast(b.Where(exists, row, ratio), INT64), -1)

    member = b.Add(b.unsqueeze(b.Mul(pools, ratio), 1), b.range(ratio))
    member = rows(member, b.unsqueeze(stored, 2), b.unsqueeze(opened, 2))

    def members(part: int) -> str:
        """Keys or gates of the pools' tokens, float32 [B, pools, ratio, Hs, Di]."""
        index = b.Pad(member, [0] * 7 + [1], b.constant(part, "int64"))
        return as_float(b, b.GatherND(tokens, index, batch_dims=1), site.activation)

    pooled = _pooled(b, site, members)
    place = b.Add(b.Mul(b.Div(total, ratio), ratio), b.range(ratio))
    tail = b.GatherND(tokens, rows(place, b.Less(place, total), opened), batch_dims=1)
    if site.storage != INT8:
        pooled = as_stored(b, pooled, site.storage)
        return tail, b.ScatterND("index_pool", index, pooled), "index_scale"
    codes, scale = quantize(b, pooled)
    pool = b.ScatterND("index_pool", index, codes)
    return tail, pool, b.ScatterND("index_scale", index, scale)


def _pooled(b: Body, site: Site, members: Callable[[int], str]) -> str:
    """Pooled keys, float32 [B, pools, Hs, Di], of `members`: keys are part 0, gates part 1.

    A pool of zeros gives zeros.
    """
    ratio, dim, sparsity = site["ratio"], site["Di"], site["weight_sparsity"]
    keys = members(0)
    if site["weighting"] == "mean":
        weight = b.constant([[[1 / ratio]]], "float32")
        pooled = b.ReduceMean(keys, [2], keepdims=0)
    else:
        gates = members(1)
        ape = as_float(b, "ape", site.activation)
        if site["weighting"] == "gate":
            logits = b.Add(gates, ape)
        else:
            asked = b.Mul(b.Gather(gates, [ratio - 1], axis=2), dim**-0.5)
            affinity = b.ReduceSum(b.Mul(keys, asked), [-1], keepdims=1)
            logits = b.Add(affinity, b.Gather(ape, [0], axis=2))
        weight = b.Softmax(logits, axis=2)
        if sparsity > 0:
            weight = b.Where(b.Less(weight, sparsity), 0.0, weight)
            weight = b.Div(weight, b.ReduceSum(weight, [2], keepdims=1))
        pooled = b.ReduceSum(b.Mul(weight, keys), [2], keepdims=0)
    if site["fuse"]:
        fusion = b.transpose(as_float(b, "fusion", site.activation), 0, 2, 1)
        pooled = b.Squeeze(b.MatMul(b.unsqueeze(pooled, 3), fusion), [3])
    if site["post_norm"] == "l2":
        share = b.Mul(b.ReduceMean(weight, [-1], keepdims=1), b.ReduceL2(keys, [-1], keepdims=1))
        norm = b.Max(b.ReduceL2(pooled, [-1], keepdims=1), 1e-12)
        pooled = b.Mul(pooled, b.Div(b.ReduceSum(share, [2], keepdims=0), norm))
    return pooled


register(
    Operator(
        name="IndexPool",
        torch_op=index_pool,
        text="""\
Pool every `ratio` index keys of a sequence into one vector. Pool p has the tokens ratio * p + i and
is written when the last of them comes; a stored pool never changes. Until then its keys and gates
wait in `tail`, token i of the open pool at place i.

For each head m = sum_i a_i * k_i with weights a that are, by `weighting`,

* `gate`: softmax over i of gates[i] + ape[i], for each channel;
* `query`: softmax over i of <k_i, q> / sqrt(Di) + ape[i, h, 0], q = the gates of the last token;
* `mean`: 1 / ratio.

Weights under `weight_sparsity` become 0 and the others are renormalised. With `fuse`,
m = fusion @ m. With post_norm `l2`, m * (sum_i mean_c(a_i) * |k_i|) / max(|m|, 1e-12).""",
        inputs=(
            Argument("keys", "T", ("B", "S", "Hs", "Di"), "new index keys."),
            Argument(
                "gates", "T", ("B", "S", "Hs", "Di"),
                "gate logits (`gate`) or the group's mean query (`query`).", "`mean`",
            ),
            Argument(
                "ape", "T", ("ratio", "Hs", "Di"), "added to the logits by place.", "`mean`"
            ),
            Argument("fusion", "T", ("Hs", "Di", "Di"), "applied to a pooled key.", "fuse = 0"),
            Argument(
                "tail", "T", ("B", "ratio", 2, "Hs", "Di"),
                "keys and gates of the open pool, by place; the rest is zero.",
            ),
            Argument("index_pool", "P", ("Hs", "NP", "U", "Di"), "pooled keys of all pages."),
            Argument("index_scale", "float32", ("Hs", "NP", "U"), "scales of int8.", "P = T"),
            *PAGING,
        ),
        outputs=(
            Argument("tail_out", "T", ("B", "ratio", 2, "Hs", "Di"), "the open pool after it."),
            Argument("index_pool_out", "P", ("Hs", "NP", "U", "Di"), "with closed pools written."),
            Argument("index_scale_out", "float32", ("Hs", "NP", "U"), "with their scales."),
        ),
        attributes=(
            Attribute("ratio", int, "keys per pool."),
            Attribute("weighting", str, "how keys are weighted in a pool.", WEIGHTINGS),
            Attribute("post_norm", str, "`l2` restores the weighted mean key norm.", POST_NORMS),
            Attribute("fuse", int, "1: multiply pooled keys by `fusion`."),
            Attribute("weight_sparsity", float, "weights below it are zeroed; under 1 / ratio."),
        ),
        body=_body,
    )
)  # fmt: skip
