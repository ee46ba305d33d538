"""How fast a model can at most be on a target: bytes over bandwidth, or operations over rate.

The roofline of Williams, Waterman and Patterson (2009). docs/plan.md has the formulas.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple, Union

from ..config import ModelConfig, weight_shapes
from ..targets import PowerMode, Target
from .footprint import (
    EMBEDDING,
    HALVED,
    HEAD,
    STEP_TOKENS,
    Precision,
    is_linear,
    memory,
    precisions_of,
    product,
    stored,
)

Key = Tuple[str, str, str]


@dataclass(frozen=True)
class Mode:
    """What a GPU gives in a power mode: bytes, and multiplications and additions, per second."""

    name: str
    bandwidth: float
    fp16: float
    int8: float


@dataclass(frozen=True)
class Speed:
    """At best: seconds until the first token of a full prompt, then tokens per second (batch)."""

    prefill_s: float
    decode_tokens_s: float


def mode_of(name: str, gpu: Union[Target, PowerMode]) -> Optional[Mode]:
    """The rates of a GPU, or of what a power mode leaves of it; None where one is not known."""
    if not (gpu.bandwidth_gb_s and gpu.fp16_tflops and gpu.int8_tops):
        return None
    return Mode(name, gpu.bandwidth_gb_s * 1e9, gpu.fp16_tflops * 1e12, gpu.int8_tops * 1e12)


def modes_of(target: Target) -> List[Mode]:
    """The power modes whose figures are known, each once; the GPU's own figures without any."""
    whole = mode_of("all", target)
    if whole is None:
        return []
    found = dict.fromkeys(mode_of(m.name, m) for m in target.power_modes)
    return [mode for mode in found if mode is not None] or [whole]


def speeds(config: ModelConfig, target: Target, context: int, batch: int) -> Dict[Key, Speed]:
    """Estimates by (mode, `sparse` or `dense`, precision); dense: the model with full layers."""
    variants = {"sparse": config, "dense": dense(config)}
    if variants["dense"].layer_types == config.layer_types:
        del variants["sparse"]
    return {
        (mode.name, kind, precision.name): speed(variant, target, mode, precision, context, batch)
        for mode in modes_of(target)
        for kind, variant in variants.items()
        for precision in precisions_of(target)
    }


def dense(config: ModelConfig) -> ModelConfig:
    """The same model with full attention in every layer, and so without an index."""
    index = dataclasses.replace(config.index, share=())
    full = ("full",) * config.num_layers
    return dataclasses.replace(config, layer_types=full, index=index)


def speed(
    config: ModelConfig, target: Target, mode: Mode, precision: Precision, context: int, batch: int
) -> Speed:
    """A step takes as long as its bytes or its operations, whichever is longer."""
    need = memory(config, target, precision, context, batch)
    int8, floats = linear_flops(config, precision)
    head = 2 * config.vocab_size * config.hidden_size
    head_rate = mode.int8 if precision.int8 else mode.fp16
    cache = cache_bytes(stored(config, precision), precision, context)
    moved = need.engine - need.gathered + batch * cache + 2 * need.copies

    work = int8 / mode.int8 + (floats + attention_flops(config, context)) / mode.fp16
    work += head / head_rate
    decode = batch / max(moved / mode.bandwidth, batch * work)

    steps = -(-context // STEP_TOKENS)
    work = context * int8 / mode.int8 + steps * head / head_rate
    work += (context * floats + attention_sum(config, context)) / mode.fp16
    return Speed(max(steps * moved / mode.bandwidth, batch * work), decode)


def linear_flops(config: ModelConfig, precision: Precision) -> Tuple[int, int]:
    """Operations per token in the linear layers, without the head: in INT8, and in float."""
    int8 = floats = 0
    for name, shape in weight_shapes(config).items():
        if is_linear(shape) and name not in (EMBEDDING, HEAD):
            if precision.int8:
                int8 += 2 * product(shape) * (2 if name.endswith(HALVED) else 1)
            else:
                floats += 2 * product(shape)
    return int8, floats


def attention_flops(config: ModelConfig, context: int) -> int:
    """Operations of one query at the end of the context: attention, and scoring of the index."""
    return sum(
        _attend(config) * config.attended_tokens(i, context) + _score(config, i) * context
        for i in range(config.num_layers)
    )


def attention_sum(config: ModelConfig, context: int) -> int:
    """The same for every token of a prompt: sum of `attention_flops` over contexts 1 to context."""
    total = 0
    for i in range(config.num_layers):
        most = config.attended_tokens(i, context)  # reached at that context, and kept
        total += _attend(config) * (most * (most + 1) // 2 + (context - most) * most)
        total += _score(config, i) * (context * (context + 1) // 2)
    return total


def _attend(config: ModelConfig) -> int:
    """Operations per query and attended token in one layer: two products."""
    return 4 * config.num_heads * config.head_dim


def _score(config: ModelConfig, layer: int) -> int:
    """Operations per query and token of context to score the layer's index."""
    if not config.selects(layer):
        return 0
    heads, queries, dim = config.index_heads
    return 2 * heads * queries * dim // config.index.ratio


def cache_bytes(config: ModelConfig, precision: Precision, context: int) -> int:
    """Bytes of the cache that one decode step of one sequence reads."""
    item, scale = (1, 4) if config.kv_dtype == "int8" else (precision.itemsize, 0)
    heads, _, dim = config.index_heads
    total = 0
    for i in range(config.num_layers):
        vectors = 2 * config.num_kv_heads * config.attended_tokens(i, context)
        total += vectors * (config.head_dim * item + scale)
        if config.selects(i):
            total += heads * (context // config.index.ratio) * (dim * item + scale)
    return total
