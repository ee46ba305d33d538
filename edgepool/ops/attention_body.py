"""The attention of SharedKVAttention and SharedKVRead in standard ONNX operators.

Three ways to the same result:
  gather  each query fetches its own blocks; the work does not grow with the context (few queries)
  mask    the pages of a sequence are fetched once and each query hides what it does not see
  every   select = 0: the pages of the window, or all, under a mask that the heads share
A hidden token gets weight 0 by adding HIDDEN to its score, which a NaN or an infinity survives: a
page that holds one must be cleared before it goes to another sequence.
"""

from __future__ import annotations

from .body import INT8, INT64, Body
from .pieces import HIDDEN, as_float, as_stored, first_local_block, one_token, positions
from .registry import Site

FEW = 8  # queries up to which gathering blocks pays
NOWHERE = 1 << 30  # a position that no query reaches

Pool = tuple[str, str]  # names of a pool and of its scales


def attention(b: Body, site: Site, form: str, keys: Pool, values: Pool) -> str:
    """`out` [B, S, H, D] from q, pools that hold the new tokens, and `selected`."""
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
            one_token(b, _queries(b, site)),
            (one, [_gather(one, b, site, keys, values, single=True)]),
            (more, several),
        )
    return as_stored(b, b.reshape(out, 0, 0, site["H"], site["D"]), site.activation)


# ------------------------------------------------------------------------------------- few queries


def _gather(b: Body, shared: Body, site: Site, keys: Pool, values: Pool, single: bool) -> str:
    """[B, S, Hkv, G, 1, D]. What all layers share, where queries are `single`, is in `shared`."""
    heads, dim, block_tokens = site["Hkv"], site["D"], site["block_tokens"]
    rows, bias, first = _block_tables(shared, site, single)
    fixed = shared.Add(_fixed_blocks(shared, site, single), first)
    block = b.Concat(fixed, b.Add("selected", first), axis=3)  # [B, S, Hkv, blocks]
    row = b.Gather(rows, block)

    def fetch(pool: str, *shape: int) -> str:
        """Values of the blocks' tokens, [B, S, Hkv, *shape]."""
        if site["T"] != block_tokens:
            pool = b.reshape(pool, 0, -1, block_tokens, *shape[shape.index(-1) + 1 :])
        return b.reshape(b.GatherND(pool, row), 0, 0, heads, *shape)

    k = as_float(b, fetch(keys[0], -1, dim), site.storage)
    v = as_float(b, fetch(values[0], 1, -1, dim), site.storage)
    query = b.Mul(_queries(shared, site), site["scale"])
    scores = b.MatMul(query, b.transpose(k, 0, 1, 2, 4, 3))  # [B, S, Hkv, G, tokens]
    if site.storage == INT8:
        scores = b.Mul(scores, fetch(keys[1], 1, -1))
    hidden = b.reshape(b.Gather(bias, block), 0, 0, heads, 1, -1)
    weight = b.Softmax(b.Add(scores, hidden), axis=-1)
    if site.storage == INT8:
        weight = b.Mul(weight, fetch(values[1], 1, -1))
    # A vector at a time, the CPU reads v where it is; for a few vectors, it would copy v first.
    return b.MatMul(b.unsqueeze(weight, 4), v)


def _block_tables(b: Body, site: Site, single: bool) -> tuple[str, str, str]:
    """For each query and head, where its blocks are stored and what of them it sees.

    rows int64 [n, 2]: the page of a block, and its place among the blocks of all heads there; a
    block without a page or after the query is the null page's, which reads zeros.
    bias float32 [n, block_tokens]: 0 for tokens that the query sees, HIDDEN for the others.
    first int32 [B, S, Hkv, 1]: the place of block 0 in both; a null page stands on either side, so
    that block -1 and the block after the last can be asked for.
    """
    heads, block_tokens, per_page = site["Hkv"], site["block_tokens"], _blocks_per_page(site)
    position, real = positions(b, 1 if single else b.count("q", 1))
    position = b.unsqueeze(b.Where(real, position, -1), 2)  # [B, S, 1]
    pages = b.Pad("page_table", [0, 1, 0, 1])
    blocks = b.Mul(b.count(pages, 1), per_page)
    start = b.Mul(b.Sub(b.range(blocks), per_page), block_tokens)
    if per_page > 1:
        pages = b.Expand(b.unsqueeze(pages, 2), b.shape(1, 1, per_page))
        pages = b.reshape(pages, 0, -1)
    page = b.Where(b.LessOrEqual(start, position), b.unsqueeze(pages, 1), 0)  # [B, S, blocks]
    token = b.Add(b.unsqueeze(start, 1), b.range(block_tokens))
    shown = b.LessOrEqual(token, b.unsqueeze(position, 3))
    shown = b.And(shown, b.unsqueeze(b.Greater(page, 0), 3))
    bias = b.unsqueeze(b.Where(shown, 0.0, HIDDEN), 2)
    bias = b.Expand(bias, b.shape(1, 1, heads, 1, 1))
    place = b.Mul(b.unsqueeze(b.range(heads), 1), per_page)
    place = b.Add(place, b.Mod(b.range(blocks), per_page))  # [Hkv, blocks]
    page = b.unsqueeze(page, 2)
    pairs = [b.Add(page, b.Mul(place, 0)), b.Add(b.Mul(page, 0), place)]  # [B, S, Hkv, blocks]
    rows = b.Concat(*(b.unsqueeze(x, 4) for x in pairs), axis=4)
    rows = b.cast(b.reshape(rows, -1, 2), INT64)

    length = 1 if single else b.size("q", 1)
    first = b.Mul(b.range(b.Div(b.count(rows, 0), blocks)), blocks)
    first = b.reshape(b.Add(first, per_page), -1, length, heads, 1)
    return rows, b.reshape(bias, -1, block_tokens), first


def _fixed_blocks(b: Body, site: Site, single: bool) -> str:
    """Blocks of the sinks and the local span, int32 [B, S, 1, n]; -1 and the block after the last
    stand for none."""
    window, block_tokens, per_page = site["window"], site["block_tokens"], _blocks_per_page(site)
    sinks = site["sinks"] // block_tokens
    spanned = (window + block_tokens - 2) // block_tokens + 1  # blocks of the longest local span
    position, _ = positions(b, 1 if single else b.count("q", 1))
    start = b.unsqueeze(first_local_block(b, position, window, block_tokens), 2)
    number = b.Min(b.Add(start, b.range(spanned)), b.Mul(b.count("page_table", 1), per_page))
    if sinks:
        sink = b.range(sinks)
        number = b.Concat(b.Where(b.Less(sink, start), sink, -1), number, axis=2)
    return b.unsqueeze(number, 2)


def _blocks_per_page(site: Site) -> int:
    return int(site["T"] // site["block_tokens"])


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
    position, real = positions(b, b.count("q", 1))
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

    # Places for -1, and no fewer than are chosen: TensorRT takes no more indices than data.
    bias = b.Pad(b.Where(shown, 0.0, HIDDEN), [0, 0, 0, 0, 0, site["K"]], HIDDEN)
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
    position, real = positions(b, b.count("q", 1))
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

    query = b.Mul(b.transpose(_queries(b, site), 0, 2, 3, 1, 4), site["scale"])
    scores = b.MatMul(query, b.transpose(fetch(keys), 0, 1, 2, 4, 3))  # [B, Hkv, G, S, tokens]
    mixed = b.MatMul(b.Softmax(b.Add(scores, bias), axis=-1), fetch(values))
    return b.transpose(b.Where(sees, mixed, 0.0), 0, 3, 1, 2, 4)


def _queries(b: Body, site: Site) -> str:
    """Queries by group, float32 [B, S, Hkv, G, D]. The index has them in this form too, often: then
    ONNX Runtime merges what is outside of branches."""
    groups = b.reshape("q", 0, 0, site["Hkv"], site["H"] // site["Hkv"], site["D"])
    return as_float(b, groups, site.activation)
