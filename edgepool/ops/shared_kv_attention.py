"""SharedKVAttention: write the new keys and values into their pages, then attend.

The cache update and the attention are one operator, as they are one kernel. `attend` is the
attention alone, for layers that read another layer's pages (SharedKVRead).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import quantization
from .attention_body import attention
from .body import INT8, INT64, Body
from .paging import allocated, local_start, physical_pages
from .pieces import as_float, as_stored, positions, quantize, slots, written_rows
from .registry import PAGING, Argument, Attribute, Operator, Site, register


@torch.library.custom_op("edgepool::shared_kv_attention", mutates_args=())
def shared_kv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    page_table: Tensor,
    past_len: Tensor,
    new_len: Tensor,
    selected: Tensor,
    window: int,
    sinks: int,
    block_tokens: int,
    scale: float,
    select: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attention of the new tokens; return (out, k_pool', v_pool', k_scale', v_scale').

    q             T [B, S, H, D]      queries; rows at or after new_len are padding, out is 0 there
    k, v          T [B, S, Hkv, D]    new keys and values
    k_pool, v_pool    T or int8 [NP, Hkv, T, D]     the pages of all sequences
    k_scale, v_scale  float32 [NP, Hkv, T]          scales of int8 pages; otherwise [1]
    page_table    int32 [B, MP], past_len int32 [B], new_len int32 [B]
    selected      int32 [B, S, Hs, K]     block numbers, ascending, -1 padded; Hs is Hkv or 1.
                  select = 0: int32 [1], -1

    Query t attends to the allocated tokens at or before t that are in
      select = 1: [0, sinks), the selected blocks of block_tokens tokens, and [local_start(t), t];
      select = 0: everything, or, with window > 0, [0, sinks) and (t - window, t].
    A query that sees nothing gives 0. Computed in float32 (float64 for float64 oracles).
    """
    k_out, k_scale_out = _write(k, k_pool, k_scale, page_table, past_len, new_len)
    v_out, v_scale_out = _write(v, v_pool, v_scale, page_table, past_len, new_len)
    out = attend(
        q, k_out, v_out, k_scale_out, v_scale_out, page_table, past_len, new_len, selected,
        window, sinks, block_tokens, scale, select,
    )  # fmt: skip
    return out, k_out, v_out, k_scale_out, v_scale_out


def _write(
    x: Tensor,
    pool: Tensor,
    scale: Tensor,
    page_table: Tensor,
    past_len: Tensor,
    new_len: Tensor,
) -> tuple[Tensor, Tensor]:
    """The pool and scales with the first new_len rows of x [B, S, Hkv, D] written."""
    pool, scale = pool.clone(), scale.clone()
    page_size = pool.shape[2]
    for b in range(x.shape[0]):
        new = int(new_len[b])
        position = int(past_len[b]) + torch.arange(new, device=x.device)
        page = physical_pages(page_table[b], position // page_size)
        written = page != 0
        page, slot, rows = (
            page[written],
            (position % page_size)[written],
            x[b, :new][written],
        )
        if pool.dtype == torch.int8:
            pool[page, :, slot], scale[page, :, slot] = quantization.quantize(rows)
        else:
            pool[page, :, slot] = rows.to(pool.dtype)
    return pool, scale


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    page_table: Tensor,
    past_len: Tensor,
    new_len: Tensor,
    selected: Tensor,
    window: int,
    sinks: int,
    block_tokens: int,
    scale: float,
    select: int,
) -> Tensor:
    """Attention over pages that hold the new tokens already: T [B, S, H, D]."""
    heads, dim = q.shape[2:]
    kv_heads, page_size = k_pool.shape[1:3]
    dtype = quantization.computed(k_pool.dtype, q.dtype)
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        past, new = int(past_len[b]), int(new_len[b])
        table = page_table[b, : -(-(past + new) // page_size)]  # the pages in use
        position = past + torch.arange(new, device=q.device)
        chosen = selected[b, :new] if select else None
        seen = _visible(table, position, chosen, page_size, window, sinks, block_tokens)
        seen = seen.transpose(0, 1)[:, None]  # [Hkv or 1, 1, new, N]
        keys = _logical(k_pool, k_scale, table, dtype)  # [Hkv, N, D]
        values = _logical(v_pool, v_scale, table, dtype)
        values.masked_fill_(~seen.flatten(0, 2).any(0)[:, None], 0)  # unseen NaNs have no effect

        query = (q[b, :new].to(dtype) * scale).unflatten(1, (kv_heads, -1))  # [new, Hkv, G, D]
        query = query.permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        affinity = (query @ keys.mT).unflatten(1, (heads // kv_heads, new))  # [Hkv, G, new, N]
        weight = torch.softmax(affinity.masked_fill_(~seen, -torch.inf), -1)
        mixed = (weight.flatten(1, 2) @ values).unflatten(1, (heads // kv_heads, new))
        mixed = mixed.masked_fill(~seen.any(-1, keepdim=True), 0)  # sees nothing: softmax is NaN
        out[b, :new] = mixed.permute(2, 0, 1, 3).reshape(new, heads, dim).to(q.dtype)
    return out


def _visible(
    table: Tensor,
    position: Tensor,
    selected: Tensor | None,
    page_size: int,
    window: int,
    sinks: int,
    block_tokens: int,
) -> Tensor:
    """Which of a sequence's N = MP * T tokens each query sees: bool [S, Hs or 1, N].

    selected: [S, Hs, K], or None for the rules of select = 0.
    """
    token = torch.arange(table.shape[0] * page_size, device=table.device)
    t = position[:, None, None]
    if selected is None:
        seen = (token < sinks) | (token > t - window) if window else torch.ones_like(token) > 0
    else:
        blocks = table.shape[0] * (page_size // block_tokens)
        number = selected.long()
        number = torch.where((number < 0) | (number >= blocks), blocks, number)
        chosen = torch.zeros(*selected.shape[:2], blocks + 1, dtype=torch.bool, device=table.device)
        chosen = chosen.scatter_(-1, number, True)[..., :blocks]
        seen = chosen.repeat_interleave(block_tokens, -1)
        seen = seen | (token < sinks) | (token >= local_start(t, window, block_tokens))
    return seen & (token <= t) & allocated(table, page_size)


def _logical(pool: Tensor, scale: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Pages of one sequence in logical order, dequantised: [Hkv, MP * T, D]."""
    pages = table.long()
    chosen = scale[pages] if pool.dtype == torch.int8 else scale
    return quantization.dequantize(pool[pages], chosen, dtype).transpose(0, 1).flatten(1, 2)


@shared_kv_attention.register_fake
def _(q, k, v, k_pool, v_pool, k_scale, v_scale, *_):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x) for x in (q, k_pool, v_pool, k_scale, v_scale))


def _body(b: Body, site: Site, form: str) -> Sequence[str]:
    count = written_rows(b, "k", form)
    index, stored = slots(b, *positions(b, count), site["T"], site["Hkv"], head_axis=1)
    stored = b.unsqueeze(stored, 2, 3)
    k, v = "k", "v"
    if form == "auto":
        k, v = (b.Slice(x, [0], b.unsqueeze(b.cast(count, INT64), 0), [1]) for x in (k, v))
    k, v = (as_float(b, x, site.activation) for x in (k, v))
    if site.storage == INT8:
        both = quantize(b, b.Where(stored, b.Concat(k, v, axis=2), 0.0))
        (k, v), (k_scale, v_scale) = (b.Split(x, axis=2, num_outputs=2, outputs=2) for x in both)
        k_scale = b.ScatterND("k_scale", index, k_scale)
        v_scale = b.ScatterND("v_scale", index, v_scale)
    else:
        k, v = (as_stored(b, b.Where(stored, x, 0.0), site.storage) for x in (k, v))
        k_scale, v_scale = "k_scale", "v_scale"
    k_pool, v_pool = b.ScatterND("k_pool", index, k), b.ScatterND("v_pool", index, v)
    out = attention(b, site, form, (k_pool, k_scale), (v_pool, v_scale))
    return out, k_pool, v_pool, k_scale, v_scale


POOLS = (
    Argument("k_pool", "P", ("NP", "Hkv", "T", "D"), "key pages of all sequences."),
    Argument("v_pool", "P", ("NP", "Hkv", "T", "D"), "value pages."),
    Argument("k_scale", "float32", ("NP", "Hkv", "T"), "scales of int8.", "P = T"),
    Argument("v_scale", "float32", ("NP", "Hkv", "T"), "scales of int8.", "P = T"),
)
SELECTED = Argument(
    "selected", "int32", ("B", "S", "Hs", "K"),
    "blocks to attend beside sinks and local span: distinct, allocated and outside of both (as "
    "IndexPoolSelect gives them), -1 padded; Hs is Hkv or 1.", "select = 0",
)  # fmt: skip
ATTRIBUTES = (
    Attribute("window", int, "tokens at the end that every query sees; select = 0: 0 is all."),
    Attribute("sinks", int, "tokens at the start that every query sees."),
    Attribute("block_tokens", int, "tokens in a selectable block; divides T."),
    Attribute("scale", float, "multiplies q."),
    Attribute("select", int, "1: sinks, `selected` and local span; 0: everything, or the window."),
)
register(
    Operator(
        name="SharedKVAttention",
        torch_op=shared_kv_attention,
        text="""\
Write the new keys and values into their pages, then attend. Query t sees those tokens at or before
t, of pages that it has, that are in

* select = 1: [0, sinks), the blocks of `block_tokens` tokens in `selected`, and
  [local_start(t), t], where local_start is that of IndexPoolSelect with bt = block_tokens;
* select = 0: everything, or, with window > 0, [0, sinks) and (t - window, t].

Query head h reads key and value head h // (H / Hkv), and selection head h // (H / Hkv) or 0.""",
        inputs=(
            Argument("q", "T", ("B", "S", "H", "D"), "queries."),
            Argument("k", "T", ("B", "S", "Hkv", "D"), "new keys."),
            Argument("v", "T", ("B", "S", "Hkv", "D"), "new values."),
            *POOLS,
            *PAGING,
            SELECTED,
        ),
        outputs=(
            Argument("out", "T", ("B", "S", "H", "D"), "0 where a query sees nothing."),
            Argument("k_pool_out", "P", ("NP", "Hkv", "T", "D"), "with the new keys written."),
            Argument("v_pool_out", "P", ("NP", "Hkv", "T", "D"), "with the new values written."),
            Argument("k_scale_out", "float32", ("NP", "Hkv", "T"), "with their scales."),
            Argument("v_scale_out", "float32", ("NP", "Hkv", "T"), "with their scales."),
        ),
        attributes=ATTRIBUTES,
        body=_body,
    )
)
