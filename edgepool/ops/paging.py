"""Where tokens live in paged storage, and which of them a query sees without selecting them.

A sequence's token at position p is in logical page p // T, at slot p % T; `page_table` gives the
physical page. Physical page 0 is the null page: an entry of 0, or a position beyond the table,
means "not allocated". What is not allocated is neither written nor seen.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that arithmetic on `dtype` is done in: float32, or float64 for float64 oracles."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def local_start(position: Tensor, window: int, block_tokens: int) -> Tensor:
    """First position of the local span [local_start(t), t] that query t always sees.

    max(0, floor((t + 1 - window) / block_tokens) * block_tokens): rounded down to a block, so that
    selectable blocks and local span meet without a hole. position: int64, any shape.
    """
    blocks = torch.div(position + 1 - window, block_tokens, rounding_mode="floor")
    return (blocks * block_tokens).clamp(min=0)


def physical_pages(table: Tensor, logical: Tensor) -> Tensor:
    """Physical pages (int64) of logical pages of one sequence; 0 beyond the end of its table.

    table: int32 [MP]; logical: int64, any shape, not negative.
    """
    padded = torch.cat([table.long(), table.new_zeros(1, dtype=torch.int64)])
    return padded[logical.clamp(max=table.shape[0])]


def allocated(table: Tensor, per_page: int) -> Tensor:
    """Whether each of the MP * per_page units (tokens, pools, blocks) of one sequence has a page.

    table: int32 [MP]; returns bool [MP * per_page].
    """
    return (table != 0).repeat_interleave(per_page)
