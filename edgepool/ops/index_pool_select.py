"""IndexPoolSelect: score the pooled index and keep each query's best blocks.

A block is `block` consecutive pools, block * ratio tokens. The blocks that may be chosen and the
local span that is attended anyway meet without a hole: see `local_start`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .body import FLOAT, INT8, INT32, INT64, Body
from .paging import allocated, local_start
from .pieces import HIDDEN, as_float, first_local_block, one_token, positions, written_rows
from .quantization import computed, dequantize
from .registry import PAGING, Argument, Attribute, Operator, Site, register

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

    Query t's candidates are the allocated blocks that start at or after `sinks` and end at or
    before local_start(t). Of equal scores the lower block wins. Rows at or after new_len are -1.
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
        pools = dequantize(index_pool[:, pages], scale, dtype).flatten(1, 2)  # [Hs, pools, Di]
        query = q[b, :new].to(dtype) / dim**0.5
        affinity = torch.einsum("shqd,hpd->shqp", query, pools)

        position = int(past_len[b]) + torch.arange(new, device=q.device)
        first_local = local_start(position, window, block * ratio)[:, None] // (block * ratio)
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
    number = number[..., :k].masked_fill(best[..., :k] == -torch.inf, none).sort(-1).values
    return number.masked_fill(number == none, -1).int()


@index_pool_select.register_fake
def _(q, w, index_pool, index_scale, page_table, past_len, new_len, scoring, k, *_):  # type: ignore[no-untyped-def]
    batch, length, heads = q.shape[:3]
    return q.new_empty((batch, length, heads, k), dtype=torch.int32)


NOTHING = float(1 << 24)  # stands for no block; every smaller number is exact in float32


def _body(b: Body, site: Site, form: str) -> Sequence[str]:
    if form == "mask":
        return [_logical(b, site)]
    if form == "gather":
        return [_physical(b, b, site, single=False)]
    known, scored = b.branch(), b.branch()
    fits, rows = _every_candidate(b, site)
    return b.choose(
        fits,
        (known, [known.Expand(rows, [1, 1, site["Hs"], 1])]),
        (scored, _scored(scored, b, site)),
    )


def _scored(b: Body, shared: Body, site: Site) -> Sequence[str]:
    """Storage order pays for one query, unless most pages belong to others."""
    storage, order = b.branch(), b.branch()
    mine = b.Less(b.size("index_pool", 1), _most_pages(shared))
    return b.choose(
        b.And(mine, one_token(b, "q")),
        (storage, [_physical(storage, shared, site, single=True)]),
        (order, [_logical(order, site)]),
    )


def _every_candidate(b: Body, site: Site) -> tuple[str, str]:
    """Whether no query has more than k candidates, so that no score matters, bool [1]; and then the
    candidates, int32 [B, S, 1, k]. Both are the same in every layer.

    The rows are those of the longest sequence: where q has more, the answer is no.
    """
    k, block_tokens = site["k"], site["block"] * site["ratio"]
    per_page, first = site["U"] // site["block"], site["sinks"] // block_tokens
    count = b.Max(written_rows(b, "q", "auto"), 1)
    position, real = positions(b, count)
    local = b.Where(real, first_local_block(b, position, site["window"], block_tokens), 0)
    fits = b.LessOrEqual(b.ReduceMax(local, keepdims=0), first + k)
    length = b.unsqueeze(b.cast(b.Where(fits, count, -1), INT64), 0)
    columns = -(-(first + k) // per_page)
    table = b.Slice(b.Pad("page_table", [0, 0, 0, columns]), [0], [columns], [1])
    page = b.Slice(_spread(b, b.Greater(table, 0), per_page), [first], [first + k], [1])
    number = b.Add(b.range(k), first)
    chosen = b.And(b.Less(number, b.unsqueeze(local, 2)), b.unsqueeze(page, 1))
    rows = _ascending(b, site, b.Where(chosen, b.cast(number, FLOAT), NOTHING))
    return b.Equal(b.size("q", 1), length), b.unsqueeze(rows, 2)


def _most_pages(b: Body) -> str:
    """Pages of a pool that is at least half ours, and one more: int64 [1]."""
    return b.Add(b.Mul(b.Mul(b.size("page_table", 0), b.size("page_table", 1)), [2]), [2])


def _candidates(b: Body, site: Site, table: str, single: bool) -> str:
    """Which blocks of `table` [B, columns] a query may choose: bool [B, S, columns * blocks]."""
    block_tokens, per_page = site["block"] * site["ratio"], site["U"] // site["block"]
    position, real = positions(b, 1 if single else b.count("q", 1))
    local = b.Where(real, first_local_block(b, position, site["window"], block_tokens), 0)
    number = b.range(b.Mul(b.count(table, 1), per_page))
    candidate = b.And(
        b.Less(number, b.unsqueeze(local, 2)),
        b.unsqueeze(_spread(b, b.Greater(table, 0), per_page), 1),
    )
    sinks = site["sinks"] // block_tokens
    return b.And(candidate, b.Less(sinks - 1, number)) if sinks else candidate


def _spread(b: Body, pages: str, per_page: int) -> str:
    """Values of pages [B, columns] for each of their blocks: [B, columns * per_page]."""
    if per_page == 1:
        return pages
    wide = b.Expand(b.unsqueeze(pages, 2), b.shape(1, 1, per_page))
    return b.reshape(wide, 0, -1)


def _physical(b: Body, shared: Body, site: Site, single: bool) -> str:
    """Score all pages in storage order: the index is read once, where it is, and only the few block
    scores are put into logical order. What is the same in every layer is computed in `shared`; for
    `single` queries, of a pool of fewer than `_most_pages`. The pages of others are hidden by an
    addition, so none may hold a NaN (see attention_body)."""
    heads, queries, dim, per_page = site["Hs"], site["Hq"], site["Di"], site["U"]
    block = site["block"]
    blocks = per_page // block
    extra = -(-site["k"] // blocks)  # null pages at the end: there are always k blocks
    table = shared.Pad("page_table", [0, 0, 0, extra])
    candidate = _candidates(shared, site, table, single)  # [B, S, NB]
    batch = shared.size("page_table", 0)
    length: str | int = 1 if single else shared.size("q", 1)
    rows = batch if single else shared.Mul(batch, length)

    query = b.transpose(as_float(b, "q", site.activation), 2, 4, 0, 1, 3)
    query = b.Mul(b.reshape(query, heads, dim, -1), dim**-0.5)  # [Hs, Di, rows * Hq]
    index = as_float(b, b.reshape("index_pool", heads, -1, dim), site.storage)
    scores = b.transpose(b.MatMul(index, query), 0, 2, 1)
    if site.storage == INT8:
        scores = b.Mul(scores, b.reshape("index_scale", heads, 1, -1))
    scores = b.Reshape(scores, shared.shape(heads, rows, queries, -1))
    if site["scoring"] == "relu":
        weight = b.transpose(as_float(b, "w", site.activation), 2, 0, 1, 3)
        weight = b.reshape(weight, heads, -1, 1, queries)
        scores = b.MatMul(weight, b.Relu(scores))  # [Hs, rows, 1, pools]
    else:
        most = _most_pages(shared) if single else shared.size("index_pool", 1)
        bias = _physical_bias(shared, site, table, candidate, length, rows, most)
        if single:
            bias = b.Slice(bias, [0], b.size(scores, 3), [3])
        scores = b.ReduceSum(b.Softmax(b.Add(scores, bias), axis=-1), [2], keepdims=1)
    if block > 1:
        scores = b.reshape(scores, 0, 0, 1, -1, block)
        scores = b.ReduceMax(scores, [-1], keepdims=0)  # [Hs, rows, 1, blocks in storage order]

    place = table
    if blocks > 1:
        inside = shared.Mul(shared.unsqueeze(table, 2), blocks)
        place = shared.reshape(shared.Add(inside, shared.range(blocks)), 0, -1)
    place = shared.Expand(shared.unsqueeze(place, 1), shared.shape(1, length, 1))
    place, candidate = (shared.Reshape(x, shared.shape(1, rows, 1, -1)) for x in (place, candidate))
    place = shared.Expand(place, shared.shape(heads, 1, 1, 1))
    scores = b.Where(candidate, b.GatherElements(scores, place, axis=3), float("-inf"))
    best = _best(b, site, scores)  # [Hs, rows, 1, k]
    if not single:
        best = b.Reshape(best, shared.shape(heads, batch, length, -1))
    return b.transpose(best, 1, 2, 0, 3)


def _physical_bias(
    b: Body, site: Site, table: str, candidate: str, length: str | int, rows: str, pages: str
) -> str:
    """0 for the candidate pools of a query, HIDDEN for others: [1, B * S, 1, pages * U]."""
    shown = b.Where(candidate, 0.0, HIDDEN)
    shown = b.Expand(b.unsqueeze(shown, 3), b.shape(1, 1, 1, site["block"]))
    shown = b.Reshape(shown, b.shape(rows, -1, site["U"]))  # [B * S, columns, U]
    page = b.Min(table, b.Sub(b.cast(pages, INT32), 1))
    page = b.Expand(b.unsqueeze(page, 1), b.shape(1, length, 1))
    page = b.Reshape(page, b.shape(rows, -1))
    row = b.unsqueeze(b.range(b.cast(b.Squeeze(rows, [0]), INT32)), 1)
    index = b.Concat(b.unsqueeze(b.Add(row, b.Mul(page, 0)), 2), b.unsqueeze(page, 2), axis=2)
    hidden = b.Expand(HIDDEN, b.shape(rows, pages, site["U"]))
    bias = b.ScatterND(hidden, b.cast(index, INT64), shown)
    return b.Reshape(bias, b.shape(1, rows, 1, -1))


def _logical(b: Body, site: Site) -> str:
    """Put the sequence's index into logical order first, with a block's pools apart (slot-major),
    so that masks and maxima run over contiguous blocks."""
    heads, dim, per_page, block = site["Hs"], site["Di"], site["U"], site["block"]
    blocks = per_page // block
    candidate = _candidates(b, site, "page_table", single=False)  # [B, S, NB]
    page = b.Add(
        b.unsqueeze("page_table", 1),
        b.Mul(b.unsqueeze(b.range(heads), 1), b.count("index_pool", 1)),
    )
    row = b.Mul(b.unsqueeze(page, 3), per_page)  # [B, Hs, MP, 1]
    row = b.reshape(
        b.Add(row, b.Mul(b.range(blocks), block)) if blocks > 1 else row, 0, heads, 1, -1
    )
    row = b.Add(row, b.unsqueeze(b.range(block), 1))  # [B, Hs, block, NB]
    index = as_float(b, b.Gather(b.reshape("index_pool", -1, dim), row), site.storage)
    if site.storage == INT8:
        index = b.Mul(index, b.unsqueeze(b.Gather(b.reshape("index_scale", -1), row), 4))
    index = b.reshape(index, 0, heads, 1, -1, dim)
    query = b.transpose(as_float(b, "q", site.activation), 0, 2, 3, 1, 4)
    query = b.Mul(query, dim**-0.5)  # [B, Hs, Hq, S, Di]
    scores = b.MatMul(query, b.transpose(index, 0, 1, 2, 4, 3))  # [B, Hs, Hq, S, block * NB]
    if site["scoring"] == "relu":
        weight = b.unsqueeze(b.transpose(as_float(b, "w", site.activation), 0, 2, 3, 1), 4)
        scores = b.Mul(b.Relu(scores), weight)
    else:
        bias = b.unsqueeze(b.Where(candidate, 0.0, HIDDEN), 1, 2)  # [B, 1, 1, S, NB]
        bias = b.Concat(*[bias] * block, axis=4) if block > 1 else bias
        scores = b.Softmax(b.Add(scores, bias), axis=-1)
    scores = b.ReduceSum(scores, [2], keepdims=0)  # [B, Hs, S, block * NB]
    if block > 1:
        scores = b.ReduceMax(b.reshape(scores, 0, 0, 0, block, -1), [3], keepdims=0)
    scores = b.Where(b.unsqueeze(candidate, 1), scores, float("-inf"))
    scores = b.Pad(scores, [0, 0, 0, 0, 0, 0, 0, site["k"]], float("-inf"))
    return b.transpose(_best(b, site, scores), 0, 2, 1, 3)


def _best(b: Body, site: Site, scores: str) -> str:
    """Numbers of the k best of scores [..., at least k]: int32 [..., k], ascending, -1 padded."""
    best, number = b.TopK(scores, [site["k"]], axis=-1, sorted=0, outputs=2)
    number = b.Where(b.Greater(best, float("-inf")), b.cast(number, FLOAT), NOTHING)
    return _ascending(b, site, number)


def _ascending(b: Body, site: Site, number: str) -> str:
    """Block numbers float32 [..., k], NOTHING for none, as the operator gives them."""
    ascending, _ = b.TopK(number, [site["k"]], axis=-1, largest=0, outputs=2)
    return b.cast(b.Where(b.Less(ascending, NOTHING), ascending, -1.0), INT32)


register(
    Operator(
        name="IndexPoolSelect",
        torch_op=index_pool_select,
        text="""\
Score the pooled index and keep each query's k best blocks, `block` consecutive pools each. With
bt = block * ratio and local_start(t) = max(0, floor((t + 1 - window) / bt) * bt), query t may
choose the blocks that have a page, start at or after `sinks` (a multiple of bt) and end at or
before local_start(t).

The score of pool p is, by `scoring`,

* `relu`: sum_h w[h] * relu(<q[h], m_p> / sqrt(Di));
* `softmax`: sum_h softmax of <q[h], m_p> / sqrt(Di) over the pools of the blocks it may choose.

A block's score is the maximum over its pools; of equal scores the lower block wins.""",
        inputs=(
            Argument("q", "T", ("B", "S", "Hs", "Hq", "Di"), "index queries."),
            Argument("w", "T", ("B", "S", "Hs", "Hq"), "their weights.", "`softmax`"),
            Argument("index_pool", "P", ("Hs", "NP", "U", "Di"), "pooled keys of all pages."),
            Argument("index_scale", "float32", ("Hs", "NP", "U"), "scales of int8.", "P = T"),
            *PAGING,
        ),
        outputs=(
            Argument(
                "selected", "int32", ("B", "S", "Hs", "k"),
                "logical block numbers, ascending, -1 padded.",
            ),
        ),
        attributes=(
            Attribute("scoring", str, "how a pool is scored.", SCORINGS),
            Attribute("k", int, "blocks to select."),
            Attribute("block", int, "pools in a block."),
            Attribute("ratio", int, "keys in a pool."),
            Attribute("window", int, "tokens that are attended anyway, at the end."),
            Attribute("sinks", int, "tokens that are attended anyway, at the start."),
        ),
        body=_body,
    )
)  # fmt: skip
