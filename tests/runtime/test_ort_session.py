"""ONNX Runtime sessions: state in place, types, devices; on a hand-made graph."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from edgepool.config import ModelConfig
from edgepool.errors import BadInput, MissingRequirement
from edgepool.runtime import ort_session
from edgepool.runtime.session import Session

from .fakes import config
from .tiny_graph import embedding, write_tiny_graph


def dense(**changes: object) -> ModelConfig:
    return config(num_layers=1, layer_types=("full",), max_context=1 << 20, **changes)


def expected(c: ModelConfig, tokens: list[int]) -> np.ndarray:
    """The last token's logits by the graph's definition."""
    first_page = embedding(c)[tokens[: c.page_size]].sum()
    return tokens[-1] + first_page + np.arange(c.vocab_size, dtype=np.float32) / 1024


@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
@pytest.mark.parametrize("float_type", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_steps_keep_state(tmp_path: Path, kv_dtype: str, float_type: int) -> None:
    c = dense(kv_dtype=kv_dtype)
    path = write_tiny_graph(c, tmp_path / "model.onnx", float_type)
    session = ort_session.open_session(path, c, capacity=40, chunk=3)
    tokens = [5, 300, 17, 2, 44, 9, 8]
    for start, end in [(0, 1), (1, 4), (4, 7)]:
        logits = session.feed([tokens[start:end]])
        np.testing.assert_allclose(logits[0, 0], expected(c, tokens[:end]))
    logits = session.feed([[1, 2]], [[0, 1]])
    assert logits.shape == (1, 2, c.vocab_size)
    np.testing.assert_allclose(logits[0, 1] - logits[0, 0], 1)
    per_token = {"fp16": 4 if float_type == TensorProto.FLOAT else 2, "int8": 1}[kv_dtype]
    scales = 2 * 6 * 2 * 8 * 4 if kv_dtype == "int8" else 0
    assert session.cache_bytes == 2 * (6 * 2 * 8 * 8) * per_token + scales


def test_state_is_never_copied(tmp_path: Path) -> None:
    """Same buffers before and after, seen changing through the array that was bound at first."""
    c = dense()
    path = write_tiny_graph(c, tmp_path / "model.onnx")
    backend = ort_session.OrtBackend(path, c, batch=1, pages=6)
    session = Session(c, backend, batch=1, capacity=40, chunk=8)
    addresses = {name: value.data_ptr() for name, value in backend.state.items()}
    for token in range(12):
        session.feed([[token]])
    assert {name: value.data_ptr() for name, value in backend.state.items()} == addresses
    stored = backend.state["k_pool.0"].numpy()[:, 0].reshape(-1, c.head_dim)
    np.testing.assert_array_equal(stored[8:20], embedding(c)[:12])  # page 0 is the null page
    assert not stored[:8].any()


@pytest.mark.parametrize(
    ("kv_dtype", "float_type"),
    [("fp16", TensorProto.FLOAT), ("fp16", TensorProto.FLOAT16), ("int8", TensorProto.FLOAT)],
)
def test_a_step_costs_the_same_whatever_the_capacity(
    tmp_path: Path, kv_dtype: str, float_type: int
) -> None:
    """Over 100 MB of state against some KB: copying it once takes some 30 ms, a step 0.1 ms."""
    c = dense(kv_dtype=kv_dtype, head_dim=64 if kv_dtype == "int8" else 16)
    path = write_tiny_graph(c, tmp_path / "model.onnx", float_type)

    def step_seconds(capacity: int) -> float:
        session = ort_session.open_session(path, c, capacity=capacity, threads=1)
        times = []
        for token in range(30):
            started = time.perf_counter()
            session.feed([[token]])
            times.append(time.perf_counter() - started)
        return min(times)

    assert step_seconds(1 << 20) < step_seconds(256) + 0.003


def test_logits_of_a_step_outlive_the_next(tmp_path: Path) -> None:
    c = dense()
    path = write_tiny_graph(c, tmp_path / "model.onnx")
    session = ort_session.open_session(path, c, capacity=40)
    first = session.feed([[3]])
    kept = first.copy()
    session.feed([[4]])
    np.testing.assert_array_equal(first, kept)


def test_refuses_a_graph_of_another_configuration(tmp_path: Path) -> None:
    path = write_tiny_graph(dense(), tmp_path / "model.onnx")
    with pytest.raises(BadInput, match="not those of its configuration.*k_scale"):
        ort_session.open_session(path, dense(kv_dtype="int8"), capacity=40)


def test_refuses_a_file_that_is_no_graph(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a graph")
    with pytest.raises(BadInput, match="ONNX Runtime cannot load it"):
        ort_session.open_session(path, dense(), capacity=40)


def test_a_provider_that_is_not_built_in(tmp_path: Path) -> None:
    path = write_tiny_graph(dense(), tmp_path / "model.onnx")
    with pytest.raises(MissingRequirement, match="no CUDAExecutionProvider"):
        ort_session.open_session(path, dense(), capacity=40, device="cuda")


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime-gpu lists CUDA without a driver and then runs on the CPU without a word."""
    path = write_tiny_graph(dense(), tmp_path / "model.onnx")
    listed = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort_session.ort, "get_available_providers", lambda: listed)
    with pytest.raises(MissingRequirement, match="could not start CUDAExecutionProvider"):
        ort_session.open_session(path, dense(), capacity=40, device="cuda")


@pytest.mark.parametrize(
    ("heads", "batch", "capacity", "chunk"),
    [
        (9, 1, 100, 256),
        (9, 1, 8192, 256),
        (9, 1, 1 << 16, 128),
        (9, 4, 1 << 16, 32),
        (32, 1, 8192, 256),
    ],
)
def test_chunks_keep_scores_in_memory(heads: int, batch: int, capacity: int, chunk: int) -> None:
    c = dense(num_heads=heads, num_kv_heads=1)
    assert ort_session.default_chunk(c, batch, capacity) == chunk
