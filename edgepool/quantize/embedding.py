"""The INT8 embedding in the form that TensorRT takes.

TensorRT allows an INT8 constant before DequantizeLinear only, so there the whole table is
dequantised and rows are gathered from that, once, while it builds. ONNX Runtime would do it in
every step: its form gathers INT8 rows and their scales (`qdq`). Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

TABLE = "embed.weight"


def for_tensorrt(model: onnx.ModelProto) -> None:
    """Gather rows of the dequantised table, in place; a graph without INT8 rows is left alone."""
    from onnx import NodeProto, helper

    nodes = {node.name: node for node in model.graph.node}
    if "embed.stored/Gather" not in nodes:
        return
    ids, product = nodes["embed.stored/Gather"].input[1], nodes["embed/Mul"]
    dequantize = next(
        (n for n in model.graph.node if TABLE in n.input and n.op_type == "DequantizeLinear"), None
    )
    if dequantize is None:
        inputs, output = [TABLE, f"{TABLE}_scale", _zeros(model)], ["embed.dequantized"]
        name = "embed/DequantizeLinear"
        dequantize = helper.make_node("DequantizeLinear", inputs, output, name, axis=0)
    rows = [dequantize.output[0], ids]
    gather = helper.make_node("Gather", rows, list(product.output), "embed/Gather")
    old = {n for n in nodes if n.startswith(("embed.stored/", "embed.scales/"))}
    old |= {product.name, dequantize.name}
    kept = [node for node in model.graph.node if node.name not in old]
    copies = [NodeProto.FromString(n.SerializeToString()) for n in (dequantize, gather, *kept)]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def _zeros(model: onnx.ModelProto) -> str:
    """Add a zero point for every row of the table; returns its name."""
    import numpy as np
    from onnx import numpy_helper

    graph = model.graph
    stored = [tensor.dims[0] for tensor in graph.initializer if tensor.name == TABLE]
    inputs = [v.type.tensor_type.shape.dim[0].dim_value for v in graph.input if v.name == TABLE]
    zeros = np.zeros((stored + inputs)[0], np.int8)
    graph.initializer.append(numpy_helper.from_array(zeros, f"{TABLE}_zero_point"))
    return f"{TABLE}_zero_point"
