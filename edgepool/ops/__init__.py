"""The edgepool operators: one file each, with its definition in PyTorch.

Every operator is functional (state comes back as new tensors) and computes in float32.
"""

from __future__ import annotations

from .index_pool import index_pool
from .index_pool_select import index_pool_select
from .shared_kv_attention import shared_kv_attention
from .shared_kv_read import shared_kv_read

__all__ = ["index_pool", "index_pool_select", "shared_kv_attention", "shared_kv_read"]
