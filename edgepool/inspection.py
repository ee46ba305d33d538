"""What `edgepool inspect` says about a configuration: how much memory a context costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List

from .config import ModelConfig, state_specs

CONTEXTS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
FLOAT_BYTES = {"fp32": 4, "fp16": 2}


@dataclass(frozen=True)
class CacheCost:
    """Bytes of one sequence's cache at a context length; attended: tokens a query reads, mean of
    the layers. dense_fp16 is what a cache of every layer's keys and values in FP16 takes."""

    context: int
    pages: int
    kv: int
    index: int
    attended: int
    dense_fp16: int

    @property
    def total(self) -> int:
        return self.kv + self.index


def cache_costs(config: ModelConfig, dtype: str) -> List[CacheCost]:
    """The cost of CONTEXTS in a graph of this float type, the null page included."""
    return [cache_cost(config, dtype, context) for context in CONTEXTS]


def cache_cost(config: ModelConfig, dtype: str, context: int) -> CacheCost:
    """The cache of one sequence of `context` tokens in a graph whose float type is `dtype`."""
    pages = 1 + -(-context // config.page_size)
    sizes = {"batch": 1, "pages": pages}
    itemsize = {"float": FLOAT_BYTES[dtype], "float32": 4, "int8": 1}
    kv = index = 0
    for spec in state_specs(config):
        count = itemsize[spec.dtype]
        for n in spec.shape:
            count *= sizes[n] if isinstance(n, str) else n
        if spec.name.startswith(("k_", "v_")):
            kv += count
        else:
            index += count
    layers = range(config.num_layers)
    attended = sum(config.attended_tokens(i, context) for i in layers) // config.num_layers
    dense = config.num_layers * 2 * config.num_kv_heads * config.head_dim * context * 2
    return CacheCost(context, pages, kv, index, attended, dense)
