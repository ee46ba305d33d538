"""FP16 graphs whose overflowing nodes stay FP32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto

from edgepool.bundle import Bundle
from edgepool.checkpoint import byte_tokenizer, save
from edgepool.cli.main import main
from edgepool.errors import GateFailed
from edgepool.exporter.export import Options, export
from edgepool.exporter.lower import runnable
from edgepool.exporter.probe import hidden_states, read_graph, watch
from edgepool.exporter.stamp import model_skeleton
from edgepool.model import Cache
from edgepool.quantize.calibrate import Options as Calibration
from edgepool.quantize.calibrate import calibrate
from edgepool.quantize.islands import keep_wide
from edgepool.quantize.runner import Stepper
from edgepool.quantize.variants import FP16, FP16_RECORD, add_fp16
from tests.exporter.models import SPARSE, config, model, weights

from .conftest import token_file

PLANTED = "layers.1.down_proj/MatMul"


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated FP32 bundle of a model that meets an activation of some 140,000."""
    folder = tmp_path_factory.mktemp("overflowing")
    ids = np.load(token_file(folder / "ids.npz"))["input_ids"][:400].tolist()
    c = config(**SPARSE)
    seen: list[torch.Tensor] = []
    plain = model(c)
    plain.layers[1].down_proj.register_forward_hook(lambda m, a, out: seen.append(out[..., 5]))
    Cache.allocate(plain, 1, len(ids)).step([ids])
    tensors = weights(c)
    tensors["layers.1.down_proj.weight"][5] *= 140_000 / float(seen[0].abs().max())
    save(folder / "model.pt", c, tensors, byte_tokenizer())
    bundle = export(folder / "model.pt", Options(folder / "edgepool-bundle"))
    calibrate(bundle.path, Calibration([folder / "ids.npz"], samples=3, length=100))
    return bundle.path


def last_hidden(path: Path, graph: onnx.ModelProto, ids: np.ndarray) -> np.ndarray:
    """The last layer's output, every node's result rounded as the graph says."""
    bundle = Bundle.open(path)
    shown = runnable(graph)
    name = hidden_states(shown)[-1]
    watch(shown, [name])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(path.resolve())
    )
    session = ort.InferenceSession(shown.SerializeToString(), options)
    stepper = Stepper(session, bundle.config, 1, len(ids))
    return stepper.step(ids[None], [0])[name]


def test_what_overflows_stays_fp32_and_the_rest_is_fp16(overflowing: Path) -> None:
    bundle = add_fp16(overflowing)
    bundle.verify()
    judged = json.loads((overflowing / FP16_RECORD).read_text())
    assert judged["overflows"][PLANTED] > 65504
    graph = read_graph(overflowing / FP16).graph
    types = {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
    made_by = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.name in judged["overflows"]:
            assert types[node.output[0]] == TensorProto.FLOAT
            assert all(made_by[name].op_type == "Cast" for name in node.input)
        elif node.op_type in ("MatMul", "Gemm"):
            assert node.input[1] not in made_by  # an FP16 weight
    weights = [t for t in graph.initializer if t.name.endswith(".weight")]
    assert len(weights) > 10
    assert {t.data_type for t in weights} == {TensorProto.FLOAT16}


def test_the_islands_are_what_keeps_it_finite(overflowing: Path, tmp_path: Path) -> None:
    add_fp16(overflowing)
    ids = np.load(overflowing.parent / "ids.npz")["input_ids"][:400]
    graph = read_graph(overflowing / FP16)
    kept = last_hidden(overflowing, graph, ids)
    exact = last_hidden(overflowing, read_graph(overflowing / "model.onnx"), ids)
    assert np.abs(exact).max() > 65504
    assert np.linalg.norm(kept - exact) < 0.05 * np.linalg.norm(exact)
    narrow = read_graph(overflowing / FP16)
    at = next(i for i, node in enumerate(narrow.graph.node) if node.name == PLANTED)
    narrow.graph.node[at].output[0] = "exact"
    for i, (source, made, to) in enumerate(
        (("exact", "rounded", TensorProto.FLOAT16), ("rounded", PLANTED, TensorProto.FLOAT))
    ):
        cast = onnx.helper.make_node("Cast", [source], [made], to=to)
        narrow.graph.node.insert(at + 1 + i, cast)
    assert not np.isfinite(last_hidden(overflowing, narrow, ids)).all()


def test_boards_get_the_same_islands(overflowing: Path) -> None:
    for target in ("jetson-agx-xavier", "jetson-agx-orin"):
        assert main(["build-engine", str(overflowing), "--fp16", "--target", target]) == 3
        graph = read_graph(overflowing / "variants" / target / FP16).graph
        types = {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
        assert types[PLANTED] == TensorProto.FLOAT
        assert types["layers.0.down_proj/MatMul"] == TensorProto.FLOAT16


@pytest.mark.parametrize(
    ("operator", "words"), [("SharedKVAttention", "its plugin cannot hold"), ("Adder", "no node")]
)
def test_what_cannot_be_kept_is_named(operator: str, words: str) -> None:
    skeleton = model_skeleton(config(**SPARSE), torch.float16)
    with pytest.raises(GateFailed, match=f"layers.1/{operator}.*{words}|{words}.*{operator}"):
        keep_wide(ir.serde.serialize_model(skeleton.model), [f"layers.1/{operator}"])
