"""Parts that several operator bodies share: where tokens are, what may be selected, INT8 storage.

Position arithmetic is int32. In a body for `single` tokens (S = 1) it depends on nothing but
page_table, past_len and new_len; such nodes are put outside the branches, where ONNX Runtime merges
those of all layers into one.
"""

from __future__ import annotations

from .body import FLOAT, INT8, INT64, Body
from .registry import Site

HIDDEN = -1e30  # added to a score: its softmax weight is exactly 0, and a row of them is no NaN


def positions(b: Body, x: str, single: bool) -> tuple[str, str]:
    """Position and realness (not padding) of the rows of x [B, S, ...]: int32, bool [B, S]."""
    past, new = b.unsqueeze("past_len", 1), b.unsqueeze("new_len", 1)
    if single:
        return past, b.Greater(new, 0)
    step = b.range(b.count(x, 1))
    return b.Add(past, step), b.Less(step, new)


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
    head_axis; and whether they are stored, bool [B, n, 1, 1]. Those that are not `real` or have no
    page get slot 0 of the null page.
    """
    page = pages_at(b, b.Div(number, per_page))
    stored = b.And(real, b.Greater(page, 0))
    place = [b.Where(stored, page, 0), b.Where(stored, b.Mod(number, per_page), 0)]
    columns = [b.Expand(b.unsqueeze(x, 2, 3), b.shape(1, 1, heads, 1)) for x in place]
    head = b.unsqueeze(b.range(heads), 1)
    columns.insert(head_axis, b.Add(b.Mul(columns[0], 0), head))
    index = b.Concat(*columns, axis=3)
    return b.cast(index, INT64), b.unsqueeze(stored, 2, 3)


def quantize(b: Body, x: str) -> tuple[str, str]:
    """INT8 codes and float32 scales of float32 vectors x [..., D]."""
    scale = b.Div(b.ReduceMax(b.Abs(x), [-1], keepdims=1), 127.0)
    codes = b.Round(b.Div(x, b.Where(b.Equal(scale, 0.0), 1.0, scale)))
    return b.cast(b.Clip(codes, -127.0, 127.0), INT8), b.Squeeze(scale, [-1])


def as_float(b: Body, x: str, element: int) -> str:
    """x in float32, the type of all arithmetic."""
    return x if element == FLOAT else b.cast(x, FLOAT)


def store(b: Body, pool: str, scale: str, index: str, rows: str, site: Site) -> None:
    """Write float32 rows into `pool` at `index`, in place where the runtime binds it so.

    Makes the outputs `<pool>_out` and `<scale>_out`.
    """
    if site.storage == INT8:
        codes, scales = quantize(b, rows)
        b.ScatterND(pool, index, codes, result=f"{pool}_out")
        b.ScatterND(scale, index, scales, result=f"{scale}_out")
    else:
        stored = rows if site.storage == FLOAT else b.cast(rows, site.storage)
        b.ScatterND(pool, index, stored, result=f"{pool}_out")
        b.Identity(scale, result=f"{scale}_out")
