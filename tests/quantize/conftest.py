"""Bundles that these tests copy and calibrate."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from edgepool.quantize.gate import Limits
from tests.exporter.conftest import exported
from tests.exporter.models import LEARNED, SPARSE, config

LOOSE = Limits(perplexity=50, agreement=0)  # random weights predict nothing, so top-1 is noise
ORIN, XAVIER = "jetson-agx-orin", "jetson-agx-xavier"


@pytest.fixture(scope="session")
def sparse_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sparse layers over the attention's own keys, a tied head."""
    folder = exported(tmp_path_factory, "quantize-sparse", config(**SPARSE), (ORIN, XAVIER))
    return folder / "edgepool-bundle"


@pytest.fixture(scope="session")
def learned_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learned index, a reader of another layer's pages, biases, a head of its own."""
    changes = dict(LEARNED, kv_donor=(0, 0, 2), qkv_bias=True, tie_embeddings=False)
    folder = exported(tmp_path_factory, "quantize-learned", config(**changes), ())
    return folder / "edgepool-bundle"


@pytest.fixture
def bundle(sparse_bundle: Path, tmp_path: Path) -> Path:
    """A copy of `sparse_bundle` to change."""
    return Path(shutil.copytree(sparse_bundle, tmp_path / "edgepool-bundle"))


def token_file(path: Path, count: int = 3000, vocabulary: int = 272) -> Path:
    """Token ids, some far more frequent than others, as npz."""
    ids = np.random.default_rng(5).zipf(1.3, count) % vocabulary
    np.savez(path, input_ids=ids.astype(np.int32))
    return path
