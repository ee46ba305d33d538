"""IndexPool: pool every `ratio` index keys of a sequence into one vector, as the pools close.

The pooled index is what a decode step scans in place of the keys: it is `ratio` times smaller. Only
pools that close in a step are written and a stored pool never changes; the members of the open pool
wait in `tail`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .body import FLOAT16, INT64, Body
from .paging import compute_dtype, physical_pages
from .pieces import as_float, one_token, positions, slots, store
from .quantization import quantize
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
            pool_out[:, page, slot], scale_out[:, page, slot] = quantize(pooled)
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


def _body(b: Body, site: Site, form: str) -> None:
    if form == "auto":
        one, many = b.branch(), b.branch()
        index, pooled, tail = b.choose(
            one_token(b, "keys"),
            (one, _one(one, b, site)),
            (many, _many(many, site)),
        )
    else:
        index, pooled, tail = _many(b, site)
    store(b, "index_pool", "index_scale", index, pooled, site)
    b.Identity(tail, result="tail_out")


def _many(b: Body, site: Site) -> tuple[str, str, str]:
    """ScatterND indices and vectors of the pools that may close, and the new tail."""
    ratio, heads = site["ratio"], site["Hs"]
    opened = b.unsqueeze(b.Mod("past_len", ratio), 1)  # tokens in the open pool, [B, 1]
    total = b.Add(opened, b.unsqueeze("new_len", 1))
    tokens = b.Concat("tail", _fresh(b, site), axis=1)  # [B, ratio + S, 2, Hs, Di]
    last = b.Add(b.count("keys", 1), ratio - 1)

    def take(token: str) -> str:
        """Keys and gates of tokens, counted from the first of the open pool: [B, n, 2, Hs, Di]."""
        row = b.Where(b.Less(token, opened), token, b.Add(token, b.Sub(ratio, opened)))
        row = b.cast(b.unsqueeze(b.Min(row, last), 2), INT64)
        return b.GatherND(tokens, row, batch_dims=1)

    pools = b.range(b.Div(last, ratio))
    members = take(b.range(b.Mul(b.Div(last, ratio), ratio)))
    pooled = _pooled(b, site, b.reshape(members, 0, -1, ratio, 2, heads, site["Di"]))
    number = b.Add(b.unsqueeze(b.Div("past_len", ratio), 1), pools)
    closes = b.Less(pools, b.Div(total, ratio))
    index, stored = slots(b, number, closes, site["U"], heads, head_axis=0)

    place = b.Add(b.Mul(b.Div(total, ratio), ratio), b.range(ratio))
    held = b.unsqueeze(b.Less(place, total), 2, 3, 4)
    return index, b.Where(stored, pooled, 0.0), b.Where(held, take(place), _zero(b, site))


def _one(b: Body, shared: Body, site: Site) -> tuple[str, str, str]:
    """As `_many` for one token a sequence; what is the same in every layer is in `shared`."""
    ratio = site["ratio"]
    past, real = positions(shared, "keys", single=True)
    place = shared.Mod(past, ratio)
    here = shared.And(shared.Equal(shared.range(ratio), place), real)
    closes = shared.And(shared.Equal(place, ratio - 1), real)
    number = shared.Div(past, ratio)
    index, stored = slots(shared, number, closes, site["U"], site["Hs"], head_axis=0)

    tokens = b.Where(shared.unsqueeze(here, 2, 3, 4), _fresh(b, site), "tail")
    pooled = _pooled(b, site, b.unsqueeze(tokens, 1))
    tail = b.Where(shared.unsqueeze(closes, 2, 3, 4), _zero(b, site), tokens)
    return b.Identity(index), b.Where(stored, pooled, 0.0), tail


def _fresh(b: Body, site: Site) -> str:
    """New keys and gates side by side, as in the tail: [B, S, 2, Hs, Di]."""
    keys = b.unsqueeze("keys", 2)
    if site["weighting"] == "mean":
        return b.Pad(keys, [0, 0, 0, 0, 0, 0, 0, 1, 0, 0])
    return b.Concat(keys, b.unsqueeze("gates", 2), axis=2)


def _zero(b: Body, site: Site) -> str:
    return b.constant(0, "float16" if site.activation == FLOAT16 else "float32")


def _pooled(b: Body, site: Site, members: str) -> str:
    """Pooled keys, float32 [B, pools, Hs, Di], of members [B, pools, ratio, 2, Hs, Di]."""
    ratio, dim, sparsity = site["ratio"], site["Di"], site["weight_sparsity"]
    keys = as_float(b, b.Gather(members, 0, axis=3), site.activation)
    if site["weighting"] == "mean":
        weight = b.constant([[[[1 / ratio]]]], "float32")
        pooled = b.ReduceMean(keys, [2], keepdims=0)
    else:
        gates = as_float(b, b.Gather(members, 1, axis=3), site.activation)
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
