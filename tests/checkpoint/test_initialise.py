"""Random weights and the byte-level tokenizer of a new model; the presets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from edgepool.checkpoint import byte_tokenizer, random_weights
from edgepool.checkpoint.model_pt import tokenizer_size
from edgepool.config import IndexConfig, ModelConfig, weight_shapes
from edgepool.model.presets import PRESETS

TINY = PRESETS["edgepool-tiny"]


def read(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: weight.read() for name, weight in random_weights(config, seed).items()}


def test_weights_have_the_spread_of_gpt2() -> None:
    weights = read(TINY)
    assert {n: tuple(t.shape) for n, t in weights.items()} == weight_shapes(TINY)
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        if name.endswith("norm.weight"):
            assert torch.all(tensor == 1)
        elif name.endswith((".bias", ".ape")):
            assert torch.all(tensor == 0)
        else:
            residual = name.split(".")[-2] in ("o_proj", "down_proj")
            expected = 0.02 / math.sqrt(8) if residual else 0.02
            assert tensor.std().item() == pytest.approx(expected, rel=0.15), name
            assert abs(tensor.mean().item()) < expected / 5, name


def test_fusion_starts_as_the_identity() -> None:
    config = ModelConfig.from_dict(
        {**TINY.to_dict(), "index": {**TINY.to_dict()["index"], "fusion": True}}
    )
    fused = {n: t for n, t in read(config).items() if n.endswith(".fusion")}
    assert fused
    assert all(torch.equal(t, torch.eye(32)[None]) for t in fused.values())


def test_the_seed_decides() -> None:
    first, again, other = read(TINY, 1), read(TINY, 1), read(TINY, 2)
    name = "layers.0.q_proj.weight"
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["layers.0.o_proj.weight"])


def test_reading_order_does_not_matter() -> None:
    lazy = random_weights(TINY, 3)
    late = lazy["norm.weight"], lazy["layers.3.q_proj.weight"].read()
    assert torch.equal(late[1], read(TINY, 3)["layers.3.q_proj.weight"])


@given(st.text())
def test_byte_tokenizer_is_the_bytes(text: str) -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer())
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_tokenizer_special_tokens() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer())
    assert tokenizer.encode("<|im_start|>a<|im_end|><|endoftext|>").ids == [257, 97, 258, 256]
    assert tokenizer_size("", byte_tokenizer()) == 272
    assert tokenizer.get_vocab_size() == 272


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    config = PRESETS[name]
    assert ModelConfig.from_dict(config.to_dict()) == config
    tokenizer = Tokenizer.from_str(byte_tokenizer())
    assert config.vocab_size >= tokenizer.get_vocab_size()
    assert tokenizer.id_to_token(config.bos_token_id) == "<|endoftext|>"
    assert [tokenizer.id_to_token(i) for i in config.eos_token_ids][0] == "<|im_end|>"


def test_twelve_layers_as_designed() -> None:
    config = PRESETS["edgepool-12l"]
    assert (config.num_layers, config.hidden_size, config.window) == (12, 2048, 512)
    assert config.layer_types == ("window",) * 4 + ("keypoints",) * 4 + ("sparse",) * 4
    assert [i for i in range(12) if config.is_donor(i)] == [0, 4, 8]


def test_tiny_has_every_kind_of_layer() -> None:
    assert set(TINY.layer_types) == {"window", "keypoints", "sparse"}
    assert not TINY.is_donor(3)
    assert sum(math.prod(shape) for shape in weight_shapes(TINY).values()) < 2e6
    assert isinstance(TINY.index, IndexConfig)
