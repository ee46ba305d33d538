"""IndexPool: pool every `ratio` index keys of a sequence into one vector, as the pools close.

The pooled index is what a decode step scans in place of the keys: it is `ratio` times smaller. Only
pools that close in a step are written and a stored pool never changes; the members of the open pool
wait in `tail`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .paging import compute_dtype, physical_pages
from .quantization import quantize

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
        tokens = torch.cat(
            [tail[b, : past % ratio], fresh]
        )  # the open pool and what follows
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
        weight = torch.softmax(affinity + ape[..., 0].to(dtype), 1)[
            ..., None
        ]  # [P, ratio, Hs, 1]
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
