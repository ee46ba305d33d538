"""Small models of every kind that the exporter meets, with weights that make them disagree."""

from __future__ import annotations

from pathlib import Path

import torch

from edgepool.checkpoint import byte_tokenizer, random_weights, save
from edgepool.config import IndexConfig, ModelConfig
from edgepool.model import Model

# Every kind of layer, a reader, an untied head, biases, norms of q and k, INT8 storage.
MIXED = dict(
    layer_types=("window", "keypoints", "sparse", "full", "sparse", "keypoints"),
    kv_donor=(0, 1, 2, 3, 2, 5),
    rope_layers=(True, True, True, False, True, True),
    tie_embeddings=False,
    qkv_bias=True,
    qk_norm=True,
    kv_dtype="int8",
    index=IndexConfig(top_k=32, weighting="query", post_norm="l2"),
)
# GLM's kind of index: learned, gated, fused, one selection shared by two layers.
LEARNED = dict(
    layer_types=("sparse",) * 3,
    index=IndexConfig(
        source="learned", heads=3, dim=16, weighting="gate", fusion=True, top_k=32, share=(0, 0, 2)
    ),
)
SPARSE = dict(layer_types=("sparse",) * 2, index=IndexConfig(top_k=32))
FULL = dict(layer_types=("full",) * 2)


def config(**changes: object) -> ModelConfig:
    """A model of 32 wide layers whose contexts of 100 tokens are long."""
    sizes = dict(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_context=512,
        tie_embeddings=True,
        window=32,
        sinks=16,
    )
    merged = {**sizes, **changes}
    merged.setdefault("num_layers", len(merged["layer_types"]))  # type: ignore[arg-type]
    return ModelConfig(**merged)  # type: ignore[arg-type]


def weights(c: ModelConfig, scale: float = 8.0) -> dict[str, torch.Tensor]:
    """Random weights, `scale` times the usual size, so that attention and tokens differ."""
    read = {name: lazy.read() for name, lazy in random_weights(c, seed=1).items()}
    return {name: x * scale if x.dim() > 1 else x for name, x in read.items()}


def write_checkpoint(path: Path, c: ModelConfig) -> Path:
    save(path, c, weights(c), byte_tokenizer())
    return path


def model(c: ModelConfig) -> Model:
    made = Model(c)
    made.load_state_dict(weights(c))
    return made.requires_grad_(False).eval()
