"""SmoothQuant: the smoothed model is the same function, with tamer activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgepool.checkpoint import Checkpoint, load
from edgepool.config import ModelConfig
from edgepool.model import Cache, Model
from edgepool.quantize import blocks
from edgepool.quantize.linears import Group, Linear, by_name, groups
from edgepool.quantize.smooth import Activations, Smoothing, smoothing
from edgepool.quantize.stored import StoredWeights

IDS = np.random.default_rng(3).integers(0, 272, 120).tolist()


def smoothed(
    folder: Path, alpha: float | None
) -> tuple[ModelConfig, dict[str, torch.Tensor], Smoothing]:
    """The checkpoint's weights after smoothing with random ranges; the head has its own."""
    checkpoint = load(folder / "model.pt")
    weights = StoredWeights.of(folder / "edgepool-bundle" / "model.onnx")
    found = groups(weights.graph)
    source = np.random.default_rng(4)
    sizes = {group.name: matrix_inputs(group, weights) for group in found}
    channels = {name: source.lognormal(0, 2, n).astype(np.float32) for name, n in sizes.items()}
    squares = {name: (x / 4) ** 2 for name, x in channels.items()}
    activations = Activations(channels, squares)
    result = smoothing(checkpoint.config, found, activations, weights.read, alpha)
    config = dataclasses.replace(checkpoint.config, tie_embeddings=False)
    return config, scaled_weights(untied(checkpoint), result, by_name(found)), result


def untied(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The checkpoint's weights; a tied head becomes a table of its own."""
    weights = {name: x.float().clone() for name, x in checkpoint.weights.items()}
    weights.setdefault("lm_head.weight", weights["embed.weight"].clone())
    return weights


def scaled_weights(
    original: Mapping[str, torch.Tensor], smooth: Smoothing, linears: Collection[str]
) -> dict[str, torch.Tensor]:
    """Weights as modules have them, after smoothing."""
    weights = dict(original)
    for name, x in weights.items():
        if name.removesuffix(".weight") in linears:
            linear = Linear(name.removesuffix(".weight"), "", name, "", turned=True)
            rows, columns = smooth.factors(linear, tuple(x.shape))
            weights[name] = torch.from_numpy(blocks.scaled(x.numpy(), rows, columns))
        elif x.dim() == 1:
            weights[name] = torch.from_numpy(smooth.vector(name, x.numpy()))
    return weights


def matrix_inputs(group: Group, weights: StoredWeights) -> int:
    linear = group.linears[0]
    return weights.read(linear.weight).shape[1 if linear.turned else 0]


def logits(config: ModelConfig, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    model = Model(config)
    model.load_state_dict(weights)
    cache = Cache.allocate(model.requires_grad_(False).eval(), 1, len(IDS))
    return cache.step([IDS])


@pytest.mark.parametrize("name", ["sparse_bundle", "learned_bundle"])
@pytest.mark.parametrize("alpha", [0.3, None])
def test_smoothing_changes_no_output(
    name: str, alpha: float | None, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name).parent
    config, scaled, result = smoothed(folder, alpha)
    original = Model.from_checkpoint(load(folder / "model.pt"))
    expected = Cache.allocate(original, 1, len(IDS)).step([IDS])
    assert len(result.inputs) >= 5 * config.num_layers
    spread = max(float(s.max() / s.min()) for s in result.groups.values())
    assert spread > 10  # it does something
    torch.testing.assert_close(logits(config, scaled), expected, rtol=1e-3, atol=2e-3)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1), st.integers(0, 2**32 - 1))
def test_blocks_are_the_whole(rows: int, columns: int, axis: int, seed: int) -> None:
    source = np.random.default_rng(seed)
    matrix = source.standard_normal((rows, columns)).astype(np.float32)
    r, c = (source.uniform(0.1, 4, n).astype(np.float32) for n in (rows, columns))
    whole = matrix * r[:, None] * c[None, :]
    before, blocks.BLOCK = blocks.BLOCK, 64
    try:
        found = blocks.largest(matrix, r, c, axis)
        np.testing.assert_allclose(found, np.abs(whole).max(axis), rtol=1e-5)
        np.testing.assert_allclose(blocks.energy(matrix, r, c), np.square(whole).sum(), rtol=1e-4)
        np.testing.assert_array_equal(
            blocks.quantised(matrix, 30 * r, c),
            np.clip(np.rint(30 * r[:, None] * matrix * c), -127, 127),
        )
    finally:
        blocks.BLOCK = before
