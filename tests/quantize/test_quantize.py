"""`edgepool quantize`: the INT8 graphs against PyTorch, and what they are made of."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, numpy_helper

from edgepool.bundle import Bundle, write_manifest
from edgepool.cli.main import main
from edgepool.config import ModelConfig
from edgepool.errors import BadInput
from edgepool.model import Cache, Model
from edgepool.quantize import record
from edgepool.quantize.calibrate import Options as Calibration
from edgepool.quantize.calibrate import calibrate
from edgepool.quantize.compare import Graph, compare
from edgepool.quantize.embedding import for_tensorrt
from edgepool.quantize.linears import by_name, groups
from edgepool.quantize.quantize import NAME, Options, quantize_bundle
from edgepool.quantize.rotation import Basis
from edgepool.quantize.runner import Stepper, open_graph
from edgepool.quantize.source import prepare

from .conftest import LOOSE, ORIN, XAVIER, token_file
from .reference import rotated
from .test_smooth import scaled_weights

TURN = "lm_head.turn/MatMul"  # of a tied head: the one product in float


@pytest.fixture(scope="module", params=["sparse_bundle", "learned_bundle"])
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated and quantised copy, with model.pt beside it."""
    original: Path = request.getfixturevalue(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    bundle = Path(shutil.copytree(original, folder / "edgepool-bundle"))
    shutil.copy(original.parent / "model.pt", folder)
    calibrate(bundle, Calibration([token_file(folder / "a.npz")], samples=3, length=100))
    quantize_bundle(bundle, Options(limits=LOOSE))
    return bundle


def int8_config(bundle: Bundle) -> ModelConfig:
    return dataclasses.replace(bundle.config, kv_dtype=bundle.manifest["quantization"]["kv_dtype"])


def initializers(path: Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def graph_of_fp32(path: Path) -> onnx.GraphProto:
    return onnx.load(path / "model.onnx").graph


# --------------------------------------------------------------------------------- arithmetic


def fake(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What QuantizeLinear and DequantizeLinear make of a tensor."""
    return (x / scale).round().clamp(-128, 127) * scale


def halves(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What is left of an input that goes in twice."""
    return fake(x, scale) + fake((x - fake(x, scale)) * 254, scale) / 254


def dequantised(stored: dict[str, np.ndarray], weight: str, turned: bool) -> torch.Tensor:
    """A weight of an INT8 graph as the model has it, [out, in]."""
    whole, scale = stored[weight].astype(np.float32), stored[f"{weight}_scale"]
    return torch.from_numpy(whole * scale[:, None] if turned else (whole * scale).T.copy())


def simulated(bundle: Bundle, float_inputs: tuple[str, ...]) -> Model:
    """The reference model with the weights of the INT8 graph, and inputs in fake INT8."""
    source = prepare(bundle, alpha=None, kv=False)
    found = by_name(groups(source.weights.stored.graph))
    weights = scaled_weights(rotated(source.weights), source.smoothing, found)
    stored = initializers(bundle.path / NAME)
    for group in source.groups:
        for linear in group.linears:
            weights[f"{linear.name}.weight"] = dequantised(stored, linear.weight, linear.turned)
    weights["embed.weight"] = dequantised(stored, "embed.weight", turned=True)
    turn = torch.eye(source.config.hidden_size)
    if source.config.tie_embeddings:
        turn = torch.from_numpy(source.weights.head_input())
    model = Model(dataclasses.replace(bundle.config, tie_embeddings=False))
    model.load_state_dict(weights)
    for name, group in found.items():
        if group.name in float_inputs:
            continue
        divisor = source.smoothing.groups.get(group.name, np.ones(1, np.float32))
        scale = float((source.calibration.tensors[group.name].channels / divisor).max()) / 127
        if name == "lm_head":  # the model takes its weight and multiplies itself
            model.norm.register_forward_hook(lambda _, args, out, s=scale: fake(out @ turn, s))
        else:
            part, rounds = model.get_submodule(name), halves if "down_proj" in name else fake
            part.register_forward_pre_hook(lambda _, args, s=scale, f=rounds: (f(args[0], s),))
    return model.requires_grad_(False).eval()


@pytest.mark.parametrize("float_inputs", [(), ("layers.0.down_proj", "layers.1.q_proj")])
def test_int8_is_what_pytorch_simulates(
    quantised: Path, tmp_path: Path, float_inputs: tuple[str, ...]
) -> None:
    path = Path(shutil.copytree(quantised, tmp_path / "edgepool-bundle"))
    shutil.copy(quantised.parent / "model.pt", tmp_path)
    bundle = quantize_bundle(path, Options(kv=False, float_inputs=float_inputs, limits=LOOSE))
    ids = record.read(path / record.NAME, bundle).held_out[:150].reshape(50, 3)
    model = simulated(bundle, float_inputs)
    cache = Cache.allocate(model, *ids.shape)
    rows = torch.arange(3, dtype=torch.int32).expand(50, 3)
    inputs = torch.from_numpy(ids), cache.page_table, cache.past_len
    expected = model(*inputs, torch.full((50,), 3, dtype=torch.int32), rows, *cache.state)[
        0
    ].numpy()
    graph, _ = Graph(path / NAME, int8_config(bundle)).open(layers=False)
    stepper = Stepper(open_graph(graph, path), int8_config(bundle), *ids.shape)
    found = stepper.step(ids, range(3))["logits"]
    error = np.abs(found - expected).max((1, 2)) / np.abs(expected).max()
    # A value that lies between two steps may fall to either; then its sequence differs a little.
    assert np.median(error) < 1e-5
    assert (error < 1e-4).mean() > 0.8
    assert error.max() < 0.1


def test_it_stays_close_to_fp32_and_int8_pages_cost_little(quantised: Path) -> None:
    bundle = Bundle.open(quantised)
    ids = record.read(quantised / record.NAME, bundle).held_out[:300]
    fp32 = Graph(bundle.model_path, bundle.config)
    same = compare(fp32, fp32, ids[:100])
    assert same.perplexity_increase == pytest.approx(0, abs=1e-6)
    assert same.agreement == 100
    assert all(layer.relative == 0 for layer in same.layers.values())
    basis = Basis(bundle.config.hidden_size)
    result = compare(fp32, Graph(quantised / NAME, int8_config(bundle), basis), ids)
    assert result.predicted == len(ids) - 1
    assert len(result.layers) == bundle.config.num_layers
    assert all(0 < layer.relative < 0.2 for layer in result.layers.values())
    assert all(layer.cosine > 0.98 for layer in result.layers.values())
    assert abs(result.perplexity_increase) < 5


# --------------------------------------------------------------------------------------- form


def test_every_linear_weight_is_int8_with_a_scale_per_output(quantised: Path) -> None:
    graph = onnx.load(quantised / NAME).graph
    stored = initializers(quantised / NAME)
    made_by = {name: node for node in graph.node for name in node.output}
    found = [n for n in graph.node if n.op_type in ("MatMul", "Gemm") and n.name != TURN]
    original = groups(graph_of_fp32(quantised))
    assert len(found) == sum(len(group.linears) for group in original)
    for node in found:
        dequantize = made_by[node.input[1]]
        assert dequantize.op_type == "DequantizeLinear"
        weight, scale, zero = (stored[name] for name in dequantize.input)
        axis = next(a.i for a in dequantize.attribute if a.name == "axis")
        assert axis == (0 if node.op_type == "Gemm" else 1)
        assert (weight.dtype, scale.dtype, zero.dtype) == (np.int8, np.float32, np.int8)
        assert scale.shape == zero.shape == (weight.shape[axis],)
        assert not zero.any()
        assert np.abs(weight).max(1 - axis).min() > 110  # every channel uses its range
        assert weight.min() >= -127
    matrices = {n for n, x in stored.items() if x.dtype == np.float32 and x.ndim > 1}
    assert {n for n in matrices if "index." not in n} <= {"lm_head.turn", "parts"}


def test_activations_have_one_scale_and_a_zero_point(quantised: Path) -> None:
    stored = initializers(quantised / NAME)
    graph = onnx.load(quantised / NAME).graph
    made_by = {name: node for node in graph.node for name in node.output}
    quantizers = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    found = groups(graph_of_fp32(quantised))
    halved = [group for group in found if "down_proj" in group.name]
    assert len(quantizers) == sum(len(group.linears) for group in found) + len(halved)
    scales: dict[str, set[float]] = {}
    for node in quantizers:
        scales.setdefault(node.input[0], set()).add(float(stored[node.input[1]]))
    assert len(scales) == len(found) + len(halved)
    assert all(len(each) == 1 for each in scales.values())  # readers of one value agree
    for node in quantizers:
        scale, zero = (stored[name] for name in node.input[1:])
        assert scale.shape == zero.shape == ()
        assert (scale.dtype, zero.dtype, int(zero)) == (np.float32, np.int8, 0)
    products = [n for n in graph.node if n.op_type in ("MatMul", "Gemm") and n.name != TURN]
    inputs = [made_by[n.input[0]].op_type for n in products]
    assert set(inputs) == {"DequantizeLinear"}
    for group in halved:
        both = next(n for n in graph.node if n.name == f"{group.name}/Concat")
        assert made_by[both.input[0]].input[0] == made_by[f"{group.name}.rest/Sub"].input[0]


def test_the_state_is_int8(quantised: Path) -> None:
    inputs = {v.name: v.type.tensor_type.elem_type for v in onnx.load(quantised / NAME).graph.input}
    assert inputs["k_pool.0"] == inputs["index_pool.0"] == TensorProto.INT8
    assert inputs["k_scale.0"] == inputs["index_scale.0"] == TensorProto.FLOAT


def test_the_table_of_a_tied_head_is_stored_once(sparse_bundle: Path, quantised: Path) -> None:
    tied = Bundle.open(quantised).config.tie_embeddings
    shape = (272, 32)
    tables = [
        n for n, x in initializers(quantised / NAME).items() if x.shape in (shape, shape[::-1])
    ]
    assert sorted(tables) == (["embed.weight"] if tied else ["embed.weight", "lm_head.weight"])


def test_tensorrt_8_gets_float_weights_and_pairs(bundle: Path) -> None:
    calibrate(bundle, Calibration(samples=2, length=32))
    quantize_bundle(bundle, Options(limits=LOOSE))
    recorded = Bundle.open(bundle).manifest["quantization"]["variants"]
    assert recorded == {t: f"variants/{t}/{NAME}" for t in (ORIN, XAVIER)}
    path = bundle / recorded[XAVIER]
    graph = onnx.load(path).graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.INT8:
            assert not numpy_helper.to_array(tensor).any()  # a zero point
    made_by = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.name != TURN:
            pair = made_by[node.input[1]]
            assert pair.op_type == "DequantizeLinear"
            assert made_by[pair.input[0]].op_type == "QuantizeLinear"
    for target in (ORIN, XAVIER):
        assert main(["check", str(bundle / recorded[target]), "--target", target]) == 0


# ---------------------------------------------------------------------------------- behaviour


def test_quantising_again_gives_the_same_files(quantised: Path) -> None:
    before = Bundle.open(quantised).manifest
    again = quantize_bundle(quantised, Options(limits=LOOSE))
    again.verify()
    assert again.manifest["files"][NAME] == before["files"][NAME]
    assert again.manifest["files"]["model.onnx"] == before["files"]["model.onnx"]
    assert again.manifest["quantization"] == before["quantization"]


def test_without_a_calibration_it_makes_one(bundle: Path) -> None:
    result = quantize_bundle(bundle, Options(limits=LOOSE))
    assert record.read(bundle / record.NAME, result).data["kind"] == "sampled from the model"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(alpha=1.5), "--alpha 1.5"),
        (Options(float_inputs=("layers.0.q_prj",)), "layers.0.q_prj: no linear layer"),
    ],
)
def test_what_cannot_be_used_changes_nothing(
    quantised: Path, options: Options, message: str
) -> None:
    before = (quantised / "manifest.json").read_bytes()
    with pytest.raises(BadInput, match=message):
        quantize_bundle(quantised, options)
    assert (quantised / "manifest.json").read_bytes() == before
    Bundle.open(quantised).verify()


def test_a_half_precision_bundle_is_refused(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    write_manifest(bundle, {**manifest, "dtype": "fp16"})
    with pytest.raises(BadInput, match="an fp16 bundle: INT8 is made from an FP32 one"):
        quantize_bundle(bundle, Options(limits=LOOSE))


def test_the_command_says_what_it_wrote(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(bundle), "--float-kv", "--json", "--min-agreement", "0"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["kv_dtype"] == "fp16"
    assert printed["int8_multiply_adds"] == 1
    assert printed["halved_inputs"] == ["layers.0.down_proj", "layers.1.down_proj"]


def test_tensorrt_gets_the_table_dequantised(quantised: Path) -> None:
    bundle = Bundle.open(quantised)
    ids = record.read(quantised / record.NAME, bundle).held_out[:40].reshape(8, 5)
    portable, _ = Graph(quantised / NAME, int8_config(bundle)).open(layers=False)
    changed = onnx.ModelProto.FromString(portable.SerializeToString())
    for_tensorrt(changed)
    constants = {t.name for t in changed.graph.initializer if t.data_type == TensorProto.INT8}
    for node in changed.graph.node:
        if constants & set(node.input):  # all that TensorRT allows after one
            assert node.op_type in ("QuantizeLinear", "DequantizeLinear")
    logits = []
    options = ort.SessionOptions()  # as written: ONNX Runtime cannot fuse a table with two readers
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    folder = str(quantised.resolve())
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    for graph in (portable, changed):
        session = ort.InferenceSession(graph.SerializeToString(), options)
        stepper = Stepper(session, int8_config(bundle), *ids.shape)
        logits.append(stepper.step(ids, range(5))["logits"])
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)
