"""The rules from opset 20 to 17: ONNX Runtime has to compute the same before and after."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgepool.errors import BadInput
from edgepool.exporter.lower import check_operators, parser_operators
from edgepool.exporter.opset17 import REDUCTIONS, lower_to_17

KNOWN = parser_operators("tensorrt-8.5")


def model(nodes: list[onnx.NodeProto], x: np.ndarray, **constants: np.ndarray) -> onnx.ModelProto:
    """Nodes from `x` (batch dynamic) and constants to `y`."""
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", *x.shape[1:]])],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return onnx.shape_inference.infer_shapes(made, strict_mode=True)


def lowered(before: onnx.ModelProto) -> onnx.ModelProto:
    graph = ir.serde.deserialize_model(before)
    lower_to_17(graph)
    after = ir.serde.serialize_model(graph)
    after.ir_version = 8
    assert after.opset_import[0].version == 17
    onnx.checker.check_model(after, full_check=True)
    check_operators(after, KNOWN)
    return after


def run(m: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": x})[0]


def same(node: onnx.NodeProto, x: np.ndarray, atol: float = 1e-6, **constants: Any) -> None:
    before = model([node], x, **constants)
    np.testing.assert_allclose(run(lowered(before), x), run(before, x), atol=atol, rtol=1e-5)


def numbers(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("axes", [[-1], [0, 2], None])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reductions(op: str, axes: list[int] | None, keepdims: int) -> None:
    x = np.abs(numbers(2, 3, 4)) + 0.5
    if axes is None:
        same(helper.make_node(op, ["x"], ["y"], keepdims=keepdims), x)
    else:
        node = helper.make_node(op, ["x", "axes"], ["y"], keepdims=keepdims)
        same(node, x, axes=np.array(axes, np.int64))


def test_a_reduction_keeps_its_rows_apart() -> None:
    """TensorRT 8.5 reduces everything where axes are an input, so they have to be an attribute."""
    node = helper.make_node("ReduceMean", ["x", "axes"], ["y"])
    (after,) = lowered(model([node], numbers(2, 3), axes=np.array([-1], np.int64))).graph.node
    assert list(after.input) == ["x"]
    assert list(after.attribute[0].ints) == [-1] or list(after.attribute[1].ints) == [-1]


@pytest.mark.parametrize(("size", "count"), [(6, 2), (7, 3), (5, 5)])
def test_split(size: int, count: int) -> None:
    outputs = [f"p{i}" for i in range(count)]
    x = numbers(2, size)
    nodes = [
        helper.make_node("Split", ["x"], outputs, axis=1, num_outputs=count),
        helper.make_node("Concat", outputs[::-1], ["y"], axis=1),
    ]
    before = model(nodes, x)
    np.testing.assert_array_equal(run(lowered(before), x), run(before, x))


@settings(max_examples=60, deadline=None)
@given(start=st.integers(-5, 5), end=st.none() | st.integers(-5, 5))
def test_shape(start: int, end: int | None) -> None:
    x = numbers(2, 3, 4)
    bounds = {"start": start, **({} if end is None else {"end": end})}
    before = model([helper.make_node("Shape", ["x"], ["y"], **bounds)], x)
    after = lowered(before)
    np.testing.assert_array_equal(run(after, x), run(before, x))
    assert not any(a.name in ("start", "end") for n in after.graph.node for a in n.attribute)


def test_casts() -> None:
    same(
        helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT32, saturate=1), numbers(2, 3) * 9
    )
    same(helper.make_node("CastLike", ["x", "like"], ["y"]), numbers(2, 3), like=np.zeros(1, "i8"))


@pytest.mark.parametrize("axes", [[1], [-1, 1], None])
def test_pad(axes: list[int] | None) -> None:
    x = numbers(2, 3, 4)
    count = 3 if axes is None else len(axes)
    constants = {"pads": np.arange(2 * count, dtype=np.int64), "fill": np.array(7, np.float32)}
    inputs = ["x", "pads", "fill"]
    if axes is not None:
        constants["axes"] = np.array(axes, np.int64)
        inputs.append("axes")
    same(helper.make_node("Pad", inputs, ["y"]), x, **constants)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_normalization(axis: int, bias: bool) -> None:
    x = numbers(2, 3, 8) * 5 + 3
    shape = x.shape[axis:]
    constants = {"scale": numbers(*shape), **({"bias": numbers(*shape)} if bias else {})}
    node = helper.make_node("LayerNormalization", ["x", *constants], ["y"], axis=axis, epsilon=1e-3)
    same(node, x, atol=1e-5, **constants)


def test_layer_normalization_of_half_precision_is_computed_in_float() -> None:
    """Squares of values up to 400 are beyond float16."""
    x = (numbers(2, 64) * 100).astype(np.float16)
    node = helper.make_node("LayerNormalization", ["x", "scale"], ["y"])
    scale = np.ones(64, np.float16)
    same(node, x, atol=2e-3, scale=scale)
    types = [n.op_type for n in lowered(model([node], x, scale=scale)).graph.node]
    assert types[0] == "Cast"
    assert types.count("Cast") == 2


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str) -> None:
    same(helper.make_node("Gelu", ["x"], ["y"], approximate=approximate), numbers(4, 50) * 3)


def test_quantization() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], axis=1),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], axis=1),
    ]
    x, scale = numbers(2, 3), np.array([0.1, 0.2, 0.3], np.float32)
    before = model(nodes, x, scale=scale, zero=np.zeros(3, np.int8))
    np.testing.assert_array_equal(run(lowered(before), x), run(before, x))


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (helper.make_node("GroupNormalization", ["x", "s", "s"], ["y"], num_groups=1),
         "GroupNormalization has no form in opset 17"),
        (helper.make_node("Mish", ["x"], ["y"]), "Mish has no form in opset 17"),
        (helper.make_node("Pad", ["x", "pads"], ["y"], mode="wrap"), "no mode 'wrap'"),
        (helper.make_node("ReduceMax", ["x"], ["y"], noop_with_empty_axes=1), "over no axis"),
        (helper.make_node("ScatterND", ["x", "at", "x"], ["y"], reduction="max"), "no min or max"),
        (helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[1]), "has no form in"),
    ],
)  # fmt: skip
def test_what_has_no_form_is_refused_by_name(node: onnx.NodeProto, says: str) -> None:
    node.name = "here"
    constants = {"s": np.ones(3, "f4"), "pads": np.zeros(6, "i8"), "at": np.zeros((2, 3, 1), "i8")}
    kept = {name: array for name, array in constants.items() if name in node.input}
    graph = ir.serde.deserialize_model(
        helper.make_model(
            helper.make_graph(
                [node],
                "g",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])],
                [onnx.ValueInfoProto(name="y")],
                [numpy_helper.from_array(array, name) for name, array in kept.items()],
            ),
            opset_imports=[helper.make_opsetid("", 20)],
        )
    )
    with pytest.raises(BadInput, match="node 'here'") as caught:
        lower_to_17(graph)
    assert says in str(caught.value)


def test_an_operator_that_the_parser_does_not_know() -> None:
    m = model([helper.make_node("IsInf", ["x"], ["y"], name="here")], numbers(2, 3))
    with pytest.raises(BadInput, match="node 'here': the target's parser does not know IsInf"):
        check_operators(m, KNOWN)
    check_operators(m, ())


def test_the_list_of_operators() -> None:
    """Spot checks against the table that it was taken from."""
    assert len(KNOWN) == len(set(KNOWN)) == 142
    assert {"Gather", "ScatterND", "Trilu", "Mod", "Range"} <= set(KNOWN)
    assert not {"LayerNormalization", "IsInf", "CastLike", "Gelu", "MatMulInteger"} & set(KNOWN)
