"""A graph of opset 18 to 20, as our exporter makes it, in opset 17: for TensorRT 8.5.

ONNX's own converter does not go down from 18 (ReduceMean and others), and TensorRT 8.5 silently
ignores what it does not know: the axes *input* of a reduction (it then reduces everything), start
and end of Shape, num_outputs of Split. There is one rule per operator whose meaning changed; an
operator without a rule is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from ..errors import BadInput
from .simplify import initializer, take_over

OPSET = 17

# Their axes became an input in opset 18 (ReduceSum's in 13, which TensorRT 8.5 knows).
REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSumSquare"
).split()

# Their newer versions take more types or an attribute for float8, and mean the same on ours.
UNCHANGED = "Constant ConstantOfShape Equal Identity If IsNaN Loop Reshape Scan Size".split()


def lower_to_17(model: ir.Model) -> None:
    """Rewrite every node in place and set the opset; raises BadInput for one that has no rule."""
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.domain:
            continue
        rule = RULES.get(node.op_type)
        if rule is not None:
            rule(model, node)
        elif node.op_type not in UNCHANGED and _changed(node.op_type):
            raise BadInput(f"node '{node.name}': {node.op_type} has no form in opset {OPSET}")
    model.graph.opset_imports[""] = OPSET
    ir.passes.Sequential(
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.NameFixPass(),
    )(model)


def _changed(op_type: str) -> bool:
    if not onnx.defs.has(op_type, OPSET):
        return True
    newer = onnx.defs.get_schema(op_type, 20).since_version
    return newer != onnx.defs.get_schema(op_type, OPSET).since_version


def _constant(node: ir.Node, index: int) -> np.ndarray | None:
    """The value of an input that is a constant; None for an absent input."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        return None
    if value.const_value is None:
        raise BadInput(f"node '{node.name}': input {index} has to be a constant in opset {OPSET}")
    return value.const_value.numpy()


def _put_before(
    node: ir.Node, op_type: str, inputs: list[ir.Value], **attributes: object
) -> ir.Value:
    """A new node in front of `node`, named after it; its only output, of no known shape."""
    made = ir.node(op_type, inputs, attributes, name=f"{node.name}.{op_type}")
    made.outputs[0].name = made.name
    assert node.graph is not None
    node.graph.insert_before(node, made)
    return made.outputs[0]


def _reduction(model: ir.Model, node: ir.Node) -> None:
    axes = _constant(node, 1)
    if axes is None and node.attributes.get_int("noop_with_empty_axes", 0):
        raise BadInput(f"node '{node.name}': a reduction over no axis has no form in opset {OPSET}")
    if len(node.inputs) > 1:
        node.resize_inputs(1)
    node.attributes.pop("noop_with_empty_axes", None)
    if axes is not None:
        node.attributes.add(ir.AttrInt64s("axes", axes.tolist()))


def _split(model: ir.Model, node: ir.Node) -> None:
    count = node.attributes.pop("num_outputs", None)
    if count is None:
        return
    axis = node.attributes.get_int("axis", 0)
    size = node.inputs[0].shape[axis]
    if not isinstance(size, int):
        raise BadInput(f"node '{node.name}': splits an axis of unknown length")
    part = math.ceil(size / count.as_int())
    parts = [min(part, size - i * part) for i in range(count.as_int())]
    sizes = initializer(model, f"{node.name}.split", np.array(parts, np.int64))
    node.resize_inputs(2)
    node.replace_input_with(1, sizes)


def _shape(model: ir.Model, node: ir.Node) -> None:
    start, end = node.attributes.pop("start", None), node.attributes.pop("end", None)
    if start is None and end is None:
        return
    rank = len(node.inputs[0].shape)
    wanted = range(rank)[slice(start and start.as_int(), end and end.as_int())]
    indices = initializer(model, f"{node.name}.axes", np.array(wanted, np.int64))
    whole = _put_before(node, "Shape", [node.inputs[0]])
    whole.shape, whole.type = ir.Shape([rank]), ir.TensorType(ir.DataType.INT64)
    picked = _put_before(node, "Gather", [whole, indices], axis=0)
    _replace(node, picked)


def _cast(model: ir.Model, node: ir.Node) -> None:
    node.attributes.pop("saturate", None)
    if node.op_type == "CastLike":
        result = _put_before(node, "Cast", [node.inputs[0]], to=int(node.inputs[1].dtype))
        _replace(node, result)


def _quantize(model: ir.Model, node: ir.Node) -> None:
    node.attributes.pop("saturate", None)
    if node.inputs[1].dtype not in (None, ir.DataType.FLOAT):
        raise BadInput(f"node '{node.name}': scales are float32 in opset {OPSET}")


def _pad(model: ir.Model, node: ir.Node) -> None:
    given, axes = _constant(node, 1), _constant(node, 3)
    if node.attributes.get_string("mode", "constant") == "wrap":
        raise BadInput(f"node '{node.name}': Pad has no mode 'wrap' in opset {OPSET}")
    if given is None or axes is None:
        return
    rank = len(node.inputs[0].shape)
    pads = np.zeros(2 * rank, np.int64)
    for i, axis in enumerate(axes.tolist()):
        pads[axis % rank], pads[axis % rank + rank] = given[i], given[i + len(axes)]
    node.replace_input_with(1, initializer(model, f"{node.name}.pads", pads))
    node.resize_inputs(3)


def _scatter(model: ir.Model, node: ir.Node) -> None:
    if node.attributes.get_string("reduction", "none") in ("min", "max"):
        raise BadInput(f"node '{node.name}': no min or max of {node.op_type} in opset {OPSET}")


def _layer_norm(model: ir.Model, node: ir.Node) -> None:
    """(x - mean) / sqrt(var + eps) * scale + bias over the last axes, in float32.

    LayerNormalization is in opset 17, but not in TensorRT 8.5.
    """
    x, dtype = node.inputs[0], node.inputs[0].dtype
    rank = len(x.shape)
    axes = list(range(node.attributes.get_int("axis", -1) % rank, rank))
    if dtype != ir.DataType.FLOAT:
        x = _put_before(node, "Cast", [x], to=int(ir.DataType.FLOAT))
    scalar = lambda name, value: initializer(  # noqa: E731
        model, f"{node.name}.{name}", np.array(value, np.float32)
    )
    mean = _put_before(node, "ReduceMean", [x], axes=axes, keepdims=1)
    centred = _put_before(node, "Sub", [x, mean])
    squared = _put_before(node, "Mul", [centred, centred])
    variance = _put_before(node, "ReduceMean", [squared], axes=axes, keepdims=1)
    epsilon = scalar("epsilon", node.attributes.get_float("epsilon", 1e-5))
    root = _put_before(node, "Sqrt", [_put_before(node, "Add", [variance, epsilon])])
    result = _put_before(node, "Div", [centred, root])
    if dtype != ir.DataType.FLOAT:
        result = _put_before(node, "Cast", [result], to=int(dtype))
    result = _put_before(node, "Mul", [result, node.inputs[1]])
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        result = _put_before(node, "Add", [result, node.inputs[2]])
    _replace(node, result)


def _gelu(model: ir.Model, node: ir.Node) -> None:
    """x/2 * (1 + erf(x / sqrt 2)), or Hendrycks & Gimpel's tanh form (arXiv:1606.08415)."""
    x = node.inputs[0]
    scalar = lambda name, value: initializer(  # noqa: E731
        model, f"{node.name}.{name}", np.array(value, x.dtype.numpy())
    )
    if node.attributes.get_string("approximate", "none") == "tanh":
        cube = _put_before(node, "Mul", [_put_before(node, "Mul", [x, x]), x])
        bent = _put_before(node, "Mul", [cube, scalar("cubic", 0.044715)])
        inner = _put_before(node, "Add", [x, bent])
        scaled = _put_before(node, "Mul", [inner, scalar("inner", math.sqrt(2 / math.pi))])
        curve = _put_before(node, "Tanh", [scaled])
    else:
        scaled = _put_before(node, "Mul", [x, scalar("inner", math.sqrt(0.5))])
        curve = _put_before(node, "Erf", [scaled])
    lifted = _put_before(node, "Add", [curve, scalar("one", 1.0)])
    half = _put_before(node, "Mul", [x, scalar("half", 0.5)])
    _replace(node, _put_before(node, "Mul", [half, lifted]))


def _replace(node: ir.Node, result: ir.Value) -> None:
    take_over(node.outputs[0], result)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


RULES: dict[str, Callable[[ir.Model, ir.Node], None]] = {
    **dict.fromkeys(REDUCTIONS, _reduction),
    "Cast": _cast,
    "CastLike": _cast,
    "DequantizeLinear": _quantize,
    "Gelu": _gelu,
    "LayerNormalization": _layer_norm,
    "Pad": _pad,
    "QuantizeLinear": _quantize,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Shape": _shape,
    "Split": _split,
}
