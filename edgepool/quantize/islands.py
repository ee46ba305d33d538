"""FP32 islands in a traced FP16 graph, around the nodes whose results FP16 cannot hold.

`fp16.judge` names these nodes. They compute in FP32, and so does whatever reads their results,
until a result fits into FP16 again:

    x ─Cast─▶ MatMul (FP32) ─▶ Reshape (FP32) ─▶ Add (FP32) ─Cast─▶ FP16
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import TensorProto, helper

from ..errors import GateFailed

# What gives the values that it is given: nothing is rounded there.
MOVES = ("Expand", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")


def keep_wide(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Let these nodes give FP32, and these weights (graph inputs) be FP32, in place.

    Raises GateFailed for a name that is not in the graph, and where a plugin, which takes and gives
    FP16, would have to take or give such a value.
    """
    graph = model.graph
    missing = set(names) - {node.name for node in graph.node} - {v.name for v in graph.input}
    if missing:
        raise GateFailed(f"FP16: no node '{min(missing)}' to keep in FP32: deploy it in FP32")
    editor = _Editor(model, set(names))
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        editor.add(node)
    editor.finish()


class _Editor:
    """wide: values that are FP32 where the trace has FP16; casts: FP32 copies of FP16 values."""

    def __init__(self, model: onnx.ModelProto, names: set[str]):
        self._graph = model.graph
        self._names = names
        self._types = _types(model)
        self._wide = {value.name for value in model.graph.input if value.name in names}
        self._casts: set[str] = set()

    def add(self, node: onnx.NodeProto) -> None:
        named = node.name in self._names
        reads = any(name in self._wide for name in node.input)
        if not named and (not reads or node.op_type == "Cast"):
            self._graph.node.append(node)
            return
        if node.domain:
            raise GateFailed(
                f"FP16: '{node.name}' meets a value beyond FP16, which its plugin cannot hold: "
                "deploy it in FP32 or INT8"
            )
        node.input[:] = [self._widened(name) for name in node.input]
        narrow = []
        for i, name in enumerate(node.output):
            if self._types.get(name) != TensorProto.FLOAT16:
                continue
            if named or node.op_type in MOVES:
                self._wide.add(name)
            else:
                node.output[i] = f"{name}.fp32"
                narrow.append(name)
        if node.op_type == "Cast":  # to FP16, which cannot hold the result
            node.attribute[0].i = TensorProto.FLOAT
        self._graph.node.append(node)
        for name in narrow:
            self._cast(f"{name}.fp32", name, TensorProto.FLOAT16)

    def finish(self) -> None:
        """Declare what is FP32 now."""
        graph = self._graph
        for value in graph.output:
            if value.name in self._wide:
                raise GateFailed(f"FP16: output '{value.name}' is beyond FP16: deploy it in FP32")
        for value in (*graph.input, *graph.value_info):
            if value.name in self._wide:
                value.type.tensor_type.elem_type = TensorProto.FLOAT

    def _widened(self, name: str) -> str:
        """The FP32 form of a node's input."""
        if name in self._wide or self._types.get(name) != TensorProto.FLOAT16:
            return name
        wide = f"{name}.wide"
        if wide not in self._casts:
            self._casts.add(wide)
            self._cast(name, wide, TensorProto.FLOAT)
        return wide

    def _cast(self, source: str, target: str, to: int) -> None:
        self._graph.node.append(
            helper.make_node("Cast", [source], [target], f"{target}/Cast", to=to)
        )


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """Element type of every value."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info)}
    types.update({v.name: v.type.tensor_type.elem_type for v in graph.output})
    types.update({tensor.name: tensor.data_type for tensor in graph.initializer})
    return types
