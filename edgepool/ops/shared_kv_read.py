"""SharedKVRead: the attention of a layer without keys and values, over its donor's pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention_body import attention
from .body import Body
from .registry import PAGING, Argument, Operator, Site, register
from .shared_kv_attention import ATTRIBUTES, POOLS, SELECTED, attend


@torch.library.custom_op("edgepool::shared_kv_read", mutates_args=())
def shared_kv_read(
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
    """SharedKVAttention without the write: out, T [B, S, H, D].

    The pools and scales are the donor layer's outputs of this step, which hold the new tokens;
    everything else is as in SharedKVAttention.
    """
    return attend(
        q, k_pool, v_pool, k_scale, v_scale, page_table, past_len, new_len, selected,
        window, sinks, block_tokens, scale, select,
    )  # fmt: skip


@shared_kv_read.register_fake
def _(q, *_):  # type: ignore[no-untyped-def]
    return torch.empty_like(q)


def _body(b: Body, site: Site, form: str) -> Sequence[str]:
    return [attention(b, site, form, ("k_pool", "k_scale"), ("v_pool", "v_scale"))]


register(
    Operator(
        name="SharedKVRead",
        torch_op=shared_kv_read,
        text="""\
The attention of SharedKVAttention for a layer that writes nothing: the pools are those that its
donor's SharedKVAttention puts out in the same step.""",
        inputs=(Argument("q", "T", ("B", "S", "H", "D"), "queries."), *POOLS, *PAGING, SELECTED),
        outputs=(Argument("out", "T", ("B", "S", "H", "D"), "0 where a query sees nothing."),),
        attributes=ATTRIBUTES,
        body=_body,
    )
)
