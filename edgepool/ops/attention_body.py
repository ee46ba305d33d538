"""The attention of SharedKVAttention and SharedKVRead in standard ONNX operators.

Three ways to the same result:
  gather  each query fetches its own blocks; the work does not grow with the context (few queries)
  mask    the pages of a sequence are fetched once and each query hides what it does not see
  every   select = 0: the pages of the window, or all, under a mask that the heads share
A hidden token gets weight 0 by adding HIDDEN to its score. Pages must hold finite values.
"""

from __future__ import annotations

from .body import FLOAT, INT8, INT64, Body
from .pieces import HIDDEN, as_float, first_local_block, one_token, positions
from .registry import Site

FEW = 8  # queries up to which gathering blocks pays
NOWHERE = 1 << 30  # a position that no query reaches

Pool = tuple[str, str]  # names of a pool and of its scales


def attention(b: Body, site: Site, form: str, keys: Pool, values: Pool) -> None:
    """Add the nodes that make `out` from q, pools that hold the new tokens, and `selected`."""
    if not site["select"]:
        out = _every(b, site, keys, values)
    elif form == "mask":
        out = _mask(b, site, keys, values)
    elif form == "gather":
        out = _gather(b, b, site, keys, values, single=False)
    else:
        one, more = b.branch(), b.branch()
        few, many = more.branch(), more.branch()
        several = more.choose(
            more.Less(more.size("q", 1), [FEW + 1]),
            (few, [_gather(few, few, site, keys, values, single=False)]),
            (many, [_mask(many, site, keys, values)]),
        )
        (out,) = b.choose(
            one_token(b, "q"),
            (one, [_gather(one, b, site, keys, values, single=True)]),
            (more, several),
        )
    out = b.reshape(out, 0, 0, site["H"], site["D"])
    if site.activation != FLOAT:
        out = b.cast(out, site.activation)
    b.Identity(out, result="out")


# ------------------------------------------------------------------------------------- few queries


def _gather(b: Body, shared: Body, site: Site, keys: Pool, values: Pool, single: bool) -> str:
    """[B, S, Hkv, G, D]. What is the same in every layer is computed in `shared`."""
    heads, block_tokens = site["Hkv"], site["block_tokens"]
    per_page = site["T"] // block_tokens
    table, first = _block_table(shared, site)
    fixed, fixed_bias = _fixed_blocks(shared, site, table, first, single)

    chosen = b.Gather(table, b.Add("selected", first))  # [B, S, Hs, K]
    shown = b.Greater(b.unsqueeze(chosen, 4), 0)
    bias = b.Where(shown, b.constant([0.0] * block_tokens, "float32"), HIDDEN)
    bias = b.Concat(fixed_bias, bias, axis=3)  # [B, S, Hs, blocks, block_tokens]
    bias = b.reshape(bias, 0, 0, site["Hs"], 1, -1)
    head = b.constant([[h * per_page] for h in range(heads)], "int32")
    rows = b.Add(b.Concat(fixed, chosen, axis=3), head)  # [B, S, Hkv, blocks]

    def fetch(pool: str, width: int, *shape: int) -> str:
        return b.reshape(b.Gather(b.reshape(pool, -1, block_tokens * width), rows), *shape)

    k, v = (fetch(x[0], site["D"], 0, 0, heads, -1, site["D"]) for x in (keys, values))
    query = b.reshape(_query(b, site), 0, 0, heads, site["H"] // heads, site["D"])
    k, v = as_float(b, k, site.storage), as_float(b, v, site.storage)
    scores = b.MatMul(query, b.transpose(k, 0, 1, 2, 4, 3))  # [B, S, Hkv, G, tokens]
    if site.storage == INT8:
        scores = b.Mul(scores, fetch(keys[1], 1, 0, 0, heads, 1, -1))
    weight = b.Softmax(b.Add(scores, bias), axis=-1)
    if site.storage == INT8:
        weight = b.Mul(weight, fetch(values[1], 1, 0, 0, heads, 1, -1))
    return b.MatMul(weight, v)


def _block_table(b: Body, site: Site) -> tuple[str, str]:
    """Where blocks are stored: for each block the row of its head 0 in a pool seen as rows of
    block_tokens tokens, 0 where it has no page. Flat int32 over sequences, each with a null page in
    front and behind; and the place of each sequence's block 0 in it, int32 [B, 1, 1, 1].

    Block -1 leads to a null page, and the row of a null page reads zeros.
    """
    per_page = site["T"] // site["block_tokens"]
    pages = b.Pad("page_table", [0, 1, 0, 1])
    table = b.Mul(pages, site["Hkv"] * per_page)
    if per_page > 1:
        inside = b.Where(b.unsqueeze(b.Greater(pages, 0), 2), b.range(per_page), 0)
        table = b.Add(b.unsqueeze(table, 2), inside)
    blocks = b.Mul(b.count(pages, 1), per_page)
    first = b.Add(b.Mul(b.range(b.count(pages, 0)), blocks), per_page)
    return b.reshape(table, -1), b.unsqueeze(first, 1, 2, 3)


def _fixed_blocks(b: Body, site: Site, table: str, first: str, single: bool) -> tuple[str, str]:
    """Rows and token bias of the sinks and the local span: [B, S, Hs, n], [B, S, Hs, n, block]."""
    window, block_tokens = site["window"], site["block_tokens"]
    per_page, sinks = site["T"] // block_tokens, site["sinks"] // block_tokens
    spanned = (window + block_tokens - 2) // block_tokens + 1  # blocks of the longest local span
    position, real = positions(b, "q", single)
    position = b.unsqueeze(b.Where(real, position, -1), 2)  # [B, S, 1]
    start = first_local_block(b, position, window, block_tokens)
    number = b.Add(start, b.range(spanned))
    if sinks:
        sink = b.range(sinks)
        number = b.Concat(b.Where(b.Less(sink, start), sink, -1), number, axis=2)
    number = b.Min(number, b.Mul(b.count("page_table", 1), per_page))  # [B, S, n]
    token = b.Mul(number, block_tokens)
    rows = b.Gather(table, b.Add(number, b.Squeeze(first, [3])))
    rows = b.Where(b.Less(position, token), 0, rows)  # a block that starts after t is not read
    shown = b.LessOrEqual(
        b.Add(b.unsqueeze(token, 3), b.range(block_tokens)), b.unsqueeze(position, 3)
    )
    shown = b.And(shown, b.unsqueeze(b.Greater(rows, 0), 3))
    bias = b.unsqueeze(b.Where(shown, 0.0, HIDDEN), 2)
    heads = site["Hs"]
    return (
        b.Expand(b.unsqueeze(rows, 2), b.shape(1, 1, heads, 1)),
        b.Expand(bias, b.shape(1, 1, heads, 1, 1)),
    )


# ------------------------------------------------------------------------------------ many queries


def _mask(b: Body, site: Site, keys: Pool, values: Pool) -> str:
    """[B, S, Hkv, G, D]. Tokens are slot-major, [block_tokens, blocks], so that what is decided per
    block is added over contiguous blocks and never expanded to the tokens of each head."""
    heads, block_tokens, page_size = site["Hkv"], site["block_tokens"], site["T"]
    per_page = page_size // block_tokens
    page = b.Mul(b.unsqueeze("page_table", 1), heads * page_size)
    page = b.Add(page, b.constant([[h * page_size] for h in range(heads)], "int32"))
    block = b.Add(b.unsqueeze(page, 3), b.Mul(b.range(per_page), block_tokens))
    block = b.reshape(block, 0, heads, 1, -1)
    rows = b.Add(block, b.unsqueeze(b.range(block_tokens), 1))  # [B, Hkv, block_tokens, blocks]
    bias, sees = _block_bias(b, site)
    return _attend(b, site, keys, values, rows, 1, bias, sees)


def _block_bias(b: Body, site: Site) -> tuple[str, str]:
    """Score bias [B, Hs, 1, S, tokens] and whether a query sees anything, bool [B, Hs, 1, S, 1]."""
    window, block_tokens, heads = site["window"], site["block_tokens"], site["Hs"]
    per_page, sinks = site["T"] // block_tokens, site["sinks"] // block_tokens
    position, real = positions(b, "q", single=False)
    position = b.unsqueeze(b.Where(real, position, -1), 2)
    blocks = b.Mul(b.count("page_table", 1), per_page)
    number = b.range(blocks)
    ahead = b.Sub(position, b.Mul(number, block_tokens))  # [B, S, blocks]: t less the block's start
    allocated = b.Greater("page_table", 0)
    if per_page > 1:
        allocated = b.Expand(b.unsqueeze(allocated, 2), b.shape(1, 1, per_page))
        allocated = b.reshape(allocated, 0, -1)
    shown = b.LessOrEqual(first_local_block(b, position, window, block_tokens), number)
    if sinks:
        shown = b.Or(shown, b.Less(number, sinks))
    shown = b.And(b.And(shown, b.Less(-1, ahead)), b.unsqueeze(allocated, 1))

    bias = b.Pad(b.Where(shown, 0.0, HIDDEN), [0, 0, 0, 0, 0, 1], HIDDEN)  # a place for -1
    bias = b.Expand(b.unsqueeze(bias, 1), b.shape(1, heads, 1, 1))
    chosen = b.transpose(b.Where(b.Less("selected", 0), blocks, "selected"), 0, 2, 1, 3)
    bias = b.ScatterElements(bias, chosen, b.Expand(0.0, b.Shape(chosen)), axis=3)
    bias = b.Slice(bias, [0], b.unsqueeze(b.cast(blocks, INT64), 0), [3])  # [B, Hs, S, blocks]
    sees = b.unsqueeze(b.Less(-1.0, b.ReduceMax(bias, [3], keepdims=1)), 2)

    slot = b.unsqueeze(b.range(block_tokens), 1)
    causal = b.Where(b.LessOrEqual(slot, b.unsqueeze(ahead, 2)), 0.0, HIDDEN)
    bias = b.Add(b.unsqueeze(bias, 3), b.unsqueeze(causal, 1))  # [B, Hs, S, block_tokens, blocks]
    return b.unsqueeze(b.reshape(bias, 0, 0, 0, -1), 2), sees


def _every(b: Body, site: Site, keys: Pool, values: Pool) -> str:
    """[B, S, Hkv, G, D] for select = 0: everything, or sinks and (t - window, t]."""
    heads, page_size, window, sinks = site["Hkv"], site["T"], site["window"], site["sinks"]
    if window:
        start = b.Div(b.Max(b.Add(b.unsqueeze("past_len", 1), 1 - window), 0), page_size)
        spanned = b.Div(b.Add(b.count("q", 1), window + 2 * page_size - 3), page_size)
        number = b.Add(start, b.range(b.Min(spanned, b.count("page_table", 1))))
        if sinks:
            sink = b.range(-(-sinks // page_size))
            number = b.Concat(b.Where(b.Less(sink, start), sink, -1), number, axis=1)
        last = b.Add(b.count("page_table", 1), 1)
        pages = b.Pad("page_table", [0, 1, 0, 1])
        pages = b.GatherElements(pages, b.Min(b.Add(number, 1), last), axis=1)
    else:
        number, pages = b.range(b.count("page_table", 1)), "page_table"
    position, real = positions(b, "q", single=False)
    position = b.unsqueeze(b.Where(real, position, -1), 2)
    token = b.Add(b.unsqueeze(b.Mul(number, page_size), -1), b.range(page_size))
    token = b.Where(b.unsqueeze(b.Greater(pages, 0), 2), token, NOWHERE)
    token = b.unsqueeze(b.reshape(token, 0, -1), 1)  # [B, 1, tokens]
    shown = b.LessOrEqual(token, position)
    if window:
        near = b.Less(b.Sub(position, window), token)
        shown = b.And(shown, b.Or(near, b.Less(token, sinks)) if sinks else near)
    bias = b.unsqueeze(b.Where(shown, 0.0, HIDDEN), 1, 2)
    sees = b.Less(-1.0, b.ReduceMax(bias, [4], keepdims=1))
    head = b.constant([[h] for h in range(heads)], "int32")
    rows = b.Add(b.Mul(b.unsqueeze(pages, 1), heads), head)  # [B, Hkv, pages]
    return _attend(b, site, keys, values, rows, page_size, bias, sees)


def _attend(
    b: Body, site: Site, keys: Pool, values: Pool, rows: str, tokens: int, bias: str, sees: str
) -> str:
    """Attention [B, S, Hkv, G, D] of all queries over the same rows of `tokens` tokens.

    rows int32 [B, Hkv, ...]; bias float32 [B, heads or 1, 1, S, tokens in all]; sees bool
    [B, heads or 1, 1, S, 1].
    """
    heads, dim = site["Hkv"], site["D"]

    def fetch(pool: Pool) -> str:
        x = b.Gather(b.reshape(pool[0], -1, tokens * dim), rows)
        x = as_float(b, b.reshape(x, 0, heads, 1, -1, dim), site.storage)
        if site.storage != INT8:
            return x
        scale = b.Gather(b.reshape(pool[1], -1, tokens), rows)
        return b.Mul(x, b.reshape(scale, 0, heads, 1, -1, 1))

    query = b.reshape(_query(b, site), 0, 0, heads, site["H"] // heads, dim)
    query = b.transpose(query, 0, 2, 3, 1, 4)
    scores = b.MatMul(query, b.transpose(fetch(keys), 0, 1, 2, 4, 3))  # [B, Hkv, G, S, tokens]
    mixed = b.MatMul(b.Softmax(b.Add(scores, bias), axis=-1), fetch(values))
    return b.transpose(b.Where(sees, mixed, 0.0), 0, 3, 1, 2, 4)


def _query(b: Body, site: Site) -> str:
    return b.Mul(as_float(b, "q", site.activation), site["scale"])
