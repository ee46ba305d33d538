"""How much of its context a query attends to: the rule of the attention operators, counted."""

from __future__ import annotations

import numpy as np

from ..config import ModelConfig


def attended_tokens(config: ModelConfig, layer: int, positions: np.ndarray) -> np.ndarray:
    """Tokens that the queries at `positions` [N] attend to in the layer: [N] int64.

    A selecting layer sees [0, sinks), min(K, candidates) blocks and [local_start, t]; every
    candidate block has a finite score, so that number is exact without looking at the selection.
    """
    context = np.asarray(positions, np.int64) + 1
    kind = config.layer_types[layer]
    if kind == "full" or (kind == "window" and config.window == 0):
        return context
    if kind == "window":
        return np.minimum(context, config.sinks + config.window)
    tokens = config.index.block_tokens
    local_start = np.maximum(0, context - config.window) // tokens * tokens
    candidates = np.maximum(0, local_start - config.sinks) // tokens
    left_out = np.maximum(0, candidates - config.index.top_blocks) * tokens
    return context - left_out


def attended_fraction(config: ModelConfig, first: int, last: int) -> float:
    """Tokens attended / tokens of context, over all layers and the queries first..last."""
    positions = np.arange(first, last + 1)
    layers = [attended_tokens(config, i, positions).sum() for i in range(config.num_layers)]
    return float(sum(layers) / (config.num_layers * (positions + 1).sum()))
