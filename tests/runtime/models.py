"""A small real model: random weights, large enough that attention and selection matter."""

from __future__ import annotations

from pathlib import Path

import torch

from edgepool.checkpoint import byte_tokenizer, random_weights, save
from edgepool.config import ModelConfig

from .fakes import config

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"


def write_checkpoint(path: Path, c: ModelConfig | None = None, scale: float = 8.0) -> Path:
    """A model.pt with random weights; `scale` times the usual size, so that tokens differ."""
    c = config(chat_template=TEMPLATE, eos_token_ids=(256,)) if c is None else c
    weights = {}
    for name, lazy in random_weights(c, seed=1).items():
        tensor = lazy.read()
        weights[name] = tensor * scale if tensor.dim() > 1 else tensor
    save(path, c, weights, byte_tokenizer())
    return path


def token_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
