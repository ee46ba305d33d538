"""Rotation: another basis, the same function, no outliers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgepool.bundle import Bundle
from edgepool.checkpoint import load
from edgepool.model import Cache, Model
from edgepool.quantize.inputs import LinearInputs
from edgepool.quantize.linears import groups
from edgepool.quantize.rotation import Basis, RotatedWeights

from .reference import rotated_model

IDS = np.random.default_rng(6).integers(0, 272, 90).astype(np.int32)


@given(st.integers(1, 200), st.integers(1, 3))
def test_a_basis_is_orthogonal_and_shares_every_channel_out(size: int, rows: int) -> None:
    basis = Basis(size)
    matrix = basis.turned(np.eye(size))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-5)
    assert np.abs(matrix).max() <= np.sqrt(2 / size) + 1e-6
    x = np.random.default_rng(rows).standard_normal((rows, 2, size)).astype(np.float32)
    np.testing.assert_allclose(basis.turned(x), x @ matrix, atol=1e-4)
    np.testing.assert_allclose(basis.back(basis.turned(x)), x, atol=1e-4)


@pytest.fixture(params=["sparse_bundle", "learned_bundle"])
def exported(request: pytest.FixtureRequest) -> Bundle:
    return Bundle.open(request.getfixturevalue(request.param))


def test_rotation_changes_no_output(exported: Bundle) -> None:
    original = Model.from_checkpoint(load(exported.path.parent / "model.pt"))
    model = rotated_model(exported)
    ids = [IDS.tolist()]
    expected = Cache.allocate(original, 1, len(IDS)).step(ids)
    torch.testing.assert_close(
        Cache.allocate(model, 1, len(IDS)).step(ids), expected, rtol=1e-3, atol=2e-3
    )
    norms = [model.norm, *(layer.mlp_norm for layer in model.layers)]
    assert all((norm.weight == 1).all() for norm in norms)


def test_inputs_are_those_of_the_rotated_model(exported: Bundle) -> None:
    weights = RotatedWeights.of(exported)
    found = groups(weights.stored.graph)
    model, seen = rotated_model(exported), {}
    for group in found:
        if group.name != "lm_head":
            module = model.get_submodule(group.name)
            module.register_forward_pre_hook(
                lambda _, args, name=group.name: seen.__setitem__(name, args[0].numpy())
            )
    Cache.allocate(model, 1, len(IDS)).step([IDS.tolist()])
    ((_, inputs),) = LinearInputs(exported, weights.rotation, found).steps(IDS)
    assert set(inputs) == {group.name for group in found}
    for name, values in seen.items():
        np.testing.assert_allclose(inputs[name], values, rtol=1e-3, atol=2e-3)


def test_an_outlier_channel_is_no_outlier_any_more() -> None:
    x = np.random.default_rng(7).standard_normal((50, 576)).astype(np.float32)
    x[:, 11] *= 200
    largest = [np.abs(v).max() / np.sqrt(np.square(v).mean()) for v in (x, Basis(576).turned(x))]
    assert largest[0] > 20  # of sqrt(576)
    assert largest[1] < 5
