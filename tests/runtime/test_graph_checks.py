"""A graph that is not what its bundle says, or that fails while it runs, is one line."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from edgepool.config import ModelConfig
from edgepool.errors import BadInput, MissingRequirement
from edgepool.runtime import ort_session

from .fakes import config
from .tiny_graph import write_tiny_graph


def dense(**changes: object) -> ModelConfig:
    return config(num_layers=1, layer_types=("full",), **changes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"page_size": 16}, "'k_pool.0' is tensor(float) ['pages', 2, 8, 8]"),
        ({"head_dim": 16}, "its configuration says float ['pages', 2, 8, 16]"),
        ({"num_kv_heads": 1}, "its configuration says float ['pages', 1, 8, 8]"),
        ({"vocab_size": 321}, "'logits' is tensor(float) ['batch', 'rows', 320]"),
    ],
)
def test_refuses_a_graph_of_other_sizes(tmp_path: Path, change: dict[str, int], says: str) -> None:
    """Of what a changed configuration allocates, nothing is: the graph is looked at first."""
    path = write_tiny_graph(dense(), tmp_path / "model.onnx")
    with pytest.raises(BadInput) as failure:
        ort_session.open_session(path, dense(**change), capacity=40)
    assert says in str(failure.value)
    assert "\n" not in str(failure.value)


def edited(path: Path, name: str, kind: int, shape: list[object]) -> Path:
    """The model with another declaration of the input or output `name`."""
    model = onnx.load(path)
    for values in (model.graph.input, model.graph.output):
        for value in values:
            if value.name == name:
                value.CopyFrom(helper.make_tensor_value_info(name, kind, shape))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        ("page_table", TensorProto.INT32, ["batch", 7]),  # a graph traced with fixed sizes
        ("past_len", TensorProto.INT32, ["batch", "one"]),
        ("v_pool.0", TensorProto.DOUBLE, ["pages", 2, 8, 8]),
        ("v_pool.0", TensorProto.FLOAT, [5, 2, 8, 8]),
    ],
)
def test_refuses_other_declarations(
    tmp_path: Path, name: str, kind: int, shape: list[object]
) -> None:
    path = edited(write_tiny_graph(dense(), tmp_path / "model.onnx"), name, kind, shape)
    if name == "v_pool.0":
        edited(path, "v_pool.0_out", kind, shape)
    with pytest.raises(BadInput, match=name):
        ort_session.open_session(path, dense(), capacity=40)


def test_refuses_a_graph_without_an_output(tmp_path: Path) -> None:
    path = write_tiny_graph(dense(), tmp_path / "model.onnx")
    model = onnx.load(path)
    del model.graph.output[-1]
    onnx.save(model, path)
    with pytest.raises(BadInput, match=r"not those of its configuration \(v_pool.0_out\)"):
        ort_session.open_session(path, dense(), capacity=40)


def test_a_step_that_fails_is_one_line(tmp_path: Path) -> None:
    """The embedding lost its last rows, which no declaration shows."""
    path = write_tiny_graph(dense(), tmp_path / "model.onnx")
    model = onnx.load(path)
    table = next(x for x in model.graph.initializer if x.name == "embedding")
    table.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(table)[:5], "embedding"))
    onnx.save(model, path)
    session = ort_session.open_session(path, dense(), capacity=40)
    with pytest.raises(BadInput, match="ONNX Runtime cannot run it") as failure:
        session.feed([[300]])
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "message", ["std::bad_alloc", "BFCArena: Failed to allocate memory for requested buffer"]
)
def test_memory_that_runs_out_in_a_step(tmp_path: Path, message: str) -> None:
    class Failing:
        def run_with_iobinding(self, binding: object) -> None:
            raise RuntimeError(message)

    path = write_tiny_graph(dense(), tmp_path / "model.onnx")
    backend = ort_session.OrtBackend(path, dense(), batch=1, pages=6)
    backend._session = Failing()
    session = ort_session.Session(dense(), backend, batch=1, capacity=40, chunk=8)
    with pytest.raises(MissingRequirement, match="out of memory"):
        session.feed([[1]])
