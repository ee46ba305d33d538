"""Parts that several operator bodies share: where tokens are, what may be selected, INT8 storage.

Position arithmetic is int32. Where it depends on nothing but page_table, past_len and new_len, and
is outside of branches, ONNX Runtime merges that of all layers into one; so `auto` takes sizes from
those inputs where it can, and not from the shape of a layer's tensor.
"""

from __future__ import annotations

from .body import FLOAT, INT8, INT64, Body

HIDDEN = -1e30  # added to a score: its softmax weight is exactly 0, and a row of them is no NaN


def positions(b: Body, count: str | int) -> tuple[str, str]:
    """Position and realness (not padding) of the first rows of a step: int32, bool [B, count]."""
    past, new = b.unsqueeze("past_len", 1), b.unsqueeze("new_len", 1)
    if count == 1:
        return past, b.Greater(new, 0)
    step = b.range(count)
    return b.Add(past, step), b.Less(step, new)


def written_rows(b: Body, x: str, form: str) -> str:
    """How many of the S rows of x hold all that there is to write: an int32 scalar.

    `auto`: as many as the longest sequence has; the other forms have no sizes that depend on data.
    """
    if form != "auto":
        return b.count(x, 1)
    return b.ReduceMax("new_len", keepdims=0)


def first_local_block(b: Body, position: str, window: int, block_tokens: int) -> str:
    """local_start(t) in blocks, [B, S]."""
    return b.Div(b.Max(b.Add(position, 1 - window), 0), block_tokens)


def one_token(b: Body, x: str) -> str:
    """Whether x [B, S, ...] has S = 1, the condition of an If: bool [1]."""
    return b.Equal(b.size(x, 1), [1])


def pages_at(b: Body, logical: str) -> str:
    """Physical pages of logical pages [B, n], 0 beyond the table: int32 [B, n]."""
    padded = b.Pad("page_table", [0, 0, 0, 1])
    return b.GatherElements(padded, b.Min(logical, b.count("page_table", 1)), axis=1)


def slots(
    b: Body, number: str, real: str, per_page: int, heads: int, head_axis: int
) -> tuple[str, str]:
    """Where tokens or pools `number` [B, n], `per_page` to a page, are stored.

    ScatterND indices, int64 [B, n, heads, 3], into a pool with axes (page, slot) and a head at
    head_axis; and whether they are stored, bool [B, n]. Those that are not `real` or have no page
    get slot 0 of the null page.
    """
    page = pages_at(b, b.Div(number, per_page))
    stored = b.And(real, b.Greater(page, 0))
    place = [b.Where(stored, page, 0), b.Where(stored, b.Mod(number, per_page), 0)]
    columns = [b.Expand(b.unsqueeze(x, 2, 3), b.shape(1, 1, heads, 1)) for x in place]
    head = b.unsqueeze(b.range(heads), 1)
    columns.insert(head_axis, b.Add(b.Mul(columns[0], 0), head))
    index = b.Concat(*columns, axis=3)
    return b.cast(index, INT64), stored


def quantize(b: Body, x: str) -> tuple[str, str]:
    """INT8 codes and float32 scales of float32 vectors x [..., D]."""
    scale = b.Div(b.ReduceMax(b.Abs(x), [-1], keepdims=1), 127.0)
    codes = b.Round(b.Div(x, b.Where(b.Equal(scale, 0.0), 1.0, scale)))
    return b.cast(b.Clip(codes, -127.0, 127.0), INT8), b.Squeeze(scale, [-1])


def as_float(b: Body, x: str, element: int) -> str:
    """x in float32, the type of all arithmetic."""
    return x if element == FLOAT else b.cast(x, FLOAT)


def as_stored(b: Body, x: str, element: int) -> str:
    """float32 x as unquantised storage keeps it."""
    return x if element == FLOAT else b.cast(x, element)
