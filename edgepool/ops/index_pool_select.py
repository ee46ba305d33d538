"""IndexPoolSelect: score the pooled index and keep each query's best blocks.

A block is `block` consecutive pools, block * ratio tokens. Which blocks may be chosen, and the local
span that is attended anyway, meet without a hole: see `local_start`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .paging import allocated, local_start
from .quantization import computed, dequantize

SCORINGS = ("relu", "softmax")


@torch.library.custom_op("edgepool::index_pool_select", mutates_args=())
def index_pool_select(
    q: Tensor,
    w: Tensor,
    index_pool: Tensor,
    index_scale: Tensor,
    page_table: Tensor,
    past_len: Tensor,
    new_len: Tensor,
    scoring: str,
    k: int,
    block: int,
    ratio: int,
    window: int,
    sinks: int,
) -> Tensor:
    """The k best blocks of each query: int32 [B, S, Hs, k], ascending block numbers, -1 padded.

    q            T [B, S, Hs, Hq, Di]   Hq index queries for each of the Hs selection heads
    w            T [B, S, Hs, Hq]       weights of the index queries (`relu`); `softmax`: T [1]
    index_pool   T or int8 [Hs, NP, T/ratio, Di], index_scale float32 [Hs, NP, T/ratio] or [1]
    page_table   int32 [B, MP], past_len int32 [B], new_len int32 [B]

    Query t's candidates are the allocated blocks that start at or after `sinks` and end at or before
    local_start(t). Of equal scores the lower block wins. Rows at or after new_len are -1.
    """
    scores = block_scores(
        q, w, index_pool, index_scale, page_table, past_len, new_len,
        scoring, block, ratio, window, sinks,
    )  # fmt: skip
    return top_blocks(scores, k)


def block_scores(
    q: Tensor,
    w: Tensor,
    index_pool: Tensor,
    index_scale: Tensor,
    page_table: Tensor,
    past_len: Tensor,
    new_len: Tensor,
    scoring: str,
    block: int,
    ratio: int,
    window: int,
    sinks: int,
) -> Tensor:
    """Score of every block for every query, [B, S, Hs, NB]; -inf where it is no candidate.

    `relu` (DeepSeek sparse attention): a pool's score is sum_h w[h] * relu(<q[h], m> / sqrt(Di)).
    `softmax`: sum over h of the softmax of <q[h], m> / sqrt(Di) over the query's candidate pools.
    A block's score is the maximum over its pools.
    """
    batch, length, heads, _, dim = q.shape
    pools_per_page, columns = index_pool.shape[2], page_table.shape[1]
    dtype = computed(index_pool.dtype, q.dtype)
    blocks = columns * (pools_per_page // block)
    number = torch.arange(blocks, device=q.device)
    scores = q.new_full((batch, length, heads, blocks), -torch.inf, dtype=dtype)
    for b in range(batch):
        new = int(new_len[b])
        pages = page_table[b].long()
        scale = index_scale[:, pages] if index_pool.dtype == torch.int8 else index_scale
        pools = dequantize(index_pool[:, pages], scale, dtype).flatten(
            1, 2
        )  # [Hs, pools, Di]
        query = q[b, :new].to(dtype) / dim**0.5
        affinity = torch.einsum("shqd,hpd->shqp", query, pools)

        position = int(past_len[b]) + torch.arange(new, device=q.device)
        first_local = local_start(position, window, block * ratio)[:, None] // (
            block * ratio
        )
        candidate = (number < first_local) & (number * block * ratio >= sinks)
        candidate &= allocated(page_table[b], pools_per_page // block)  # [new, NB]
        outside = ~candidate[:, None]

        if scoring == "relu":
            score = torch.einsum("shq,shqp->shp", w[b, :new].to(dtype), affinity.relu())
        else:
            excluded = outside.repeat_interleave(block, -1)[:, :, None]
            affinity.masked_fill_(excluded, -torch.inf)
            score = torch.softmax(affinity, -1).sum(2)
        score = score.unflatten(-1, (blocks, block)).amax(-1)
        scores[b, :new] = score.masked_fill(outside, -torch.inf)
    return scores


def top_blocks(scores: Tensor, k: int) -> Tensor:
    """The k best of scores [..., NB]: int32 [..., k] ascending, -1 padded; -inf is never chosen."""
    missing = max(0, k - scores.shape[-1])
    scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    best, number = torch.sort(scores, dim=-1, descending=True, stable=True)
    none = scores.shape[-1]
    number = (
        number[..., :k].masked_fill(best[..., :k] == -torch.inf, none).sort(-1).values
    )
    return number.masked_fill(number == none, -1).int()


@index_pool_select.register_fake
def _(q, w, index_pool, index_scale, page_table, past_len, new_len, scoring, k, *_):  # type: ignore[no-untyped-def]
    batch, length, heads = q.shape[:3]
    return q.new_empty((batch, length, heads, k), dtype=torch.int32)
