"""The session over the reference model: chunks, batches and rollback on real layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edgepool.checkpoint import Checkpoint, load, save
from edgepool.model import Cache, Model, new_state
from edgepool.runtime.session import Session, physical_pages
from edgepool.runtime.torch_session import TorchBackend, open_session

from .models import token_ids, write_checkpoint

IDS = token_ids(70)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load(write_checkpoint(tmp_path_factory.mktemp("model") / "model.pt"))


@pytest.fixture(scope="module")
def one_shot(checkpoint: Checkpoint) -> np.ndarray:
    """Logits of all tokens [70,vocab] straight from the model, in one forward pass."""
    c = checkpoint.config
    pages = -(-len(IDS) // c.page_size)
    with torch.inference_mode():
        logits, *_ = Model.from_checkpoint(checkpoint)(
            torch.tensor([IDS], dtype=torch.int32),
            torch.arange(1, 1 + pages, dtype=torch.int32)[None],
            torch.zeros(1, dtype=torch.int32),
            torch.tensor([len(IDS)], dtype=torch.int32),
            torch.arange(len(IDS), dtype=torch.int32)[None],
            *new_state(c, 1, 1 + pages),
        )
    return logits[0].numpy()


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunks_and_decode(checkpoint: Checkpoint, one_shot: np.ndarray, chunk: int) -> None:
    session = open_session(checkpoint, capacity=128, chunk=chunk)
    close(session.feed([IDS[:60]], [range(60)])[0], one_shot[:60])
    for t in range(60, 70):
        close(session.feed([IDS[t : t + 1]])[0, 0], one_shot[t])


def test_rollback_and_replay(checkpoint: Checkpoint, one_shot: np.ndarray) -> None:
    session: Session = open_session(checkpoint, capacity=128)
    session.feed([IDS])
    for back in (1, 5, 6, 13, 24):
        kept = 70 - back
        session.rollback([kept])
        close(session.feed([IDS[kept:]], [range(back)])[0], one_shot[kept:])


def test_ragged_batch(checkpoint: Checkpoint, one_shot: np.ndarray) -> None:
    session = open_session(checkpoint, batch=2, capacity=128, chunk=16)
    close(session.feed([IDS[:33], token_ids(5, seed=1)])[0, 0], one_shot[32])
    close(session.feed([[IDS[33]], token_ids(50, seed=2)])[0, 0], one_shot[33])


def test_cache_bytes_are_those_of_the_state(checkpoint: Checkpoint) -> None:
    session = open_session(checkpoint, batch=2, capacity=30)
    c = checkpoint.config
    pages, heads = 1 + 2 * 4, c.num_kv_heads
    per_layer = 2 * pages * heads * 8 * 8 + pages * heads * 2 * 8 + 2 * 4 * 2 * heads * 8
    assert session.cache_bytes == 2 * 4 * per_layer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_stay_as_they_are_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    """Mapped from the file, yet computed in FP32: the logits of the widened model, to the bit."""
    path = write_checkpoint(tmp_path / "model.pt")
    stored = load(path)
    narrow = {name: x.to(dtype) for name, x in stored.weights.items()}
    save(path, stored.config, narrow, stored.tokenizer)
    checkpoint = load(path)
    backend = TorchBackend(checkpoint, 1, physical_pages(checkpoint.config, 1, 64))
    for name, parameter in backend._model.named_parameters():
        if parameter.dim() == 2:
            assert parameter.data_ptr() == checkpoint.weights[name].data_ptr(), name
    session = Session(checkpoint.config, backend, 1, 64, 64)
    mine = session.feed([IDS[:40]], [range(40)])[0]
    model = Model.from_checkpoint(checkpoint)
    cache = Cache.allocate(model, 1, 64)
    np.testing.assert_array_equal(mine, cache.step([IDS[:40]])[0].numpy())
