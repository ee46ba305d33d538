"""Random weights for a configuration, and the byte-level tokenizer that goes with a new model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..config import ModelConfig, weight_shapes
from .weights import LazyTensor

STD = 0.02  # GPT-2's; projections into the residual stream get STD / sqrt(2 * layers)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_VOCABULARY = 272  # 256 bytes and 16 special tokens


def random_weights(config: ModelConfig, seed: int) -> dict[str, LazyTensor]:
    """Float32 weights of a new model. A weight depends on the seed, its name and shape only."""
    return {
        name: LazyTensor(shape, torch.float32, _initial(config, seed, name, shape))
        for name, shape in weight_shapes(config).items()
    }


def _initial(
    config: ModelConfig, seed: int, name: str, shape: tuple[int, ...]
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith((".bias", ".ape")):
            return torch.zeros(shape)
        if name.endswith(".fusion"):  # [heads, dim, dim]: leaves the pooled key as it is
            return torch.eye(shape[-1]).repeat(shape[0], 1, 1)
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = STD / math.sqrt(2 * config.num_layers) if residual else STD
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    return read


def byte_tokenizer() -> str:
    """tokenizer.json of 272 ids: a byte is its own value, then `SPECIAL_TOKENS`, then spares."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    spares = [f"<|spare_{i}|>" for i in range(BYTE_VOCABULARY - 256 - len(SPECIAL_TOKENS))]
    special = [*SPECIAL_TOKENS, *spares]
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    vocabulary.update({token: 256 + i for i, token in enumerate(special)})
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return tokenizer.to_str()


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters.update({byte: chr(0x100 + i) for i, byte in enumerate(others)})
    return [characters[byte] for byte in range(256)]
