"""Explicit Q/DQ in a traced graph: what is INT8, stored how, scaled by what.

    weight  INT8 [..] -> DequantizeLinear(scale per output channel) -> MatMul or Gemm
    input   -> QuantizeLinear (one scale) -> DequantizeLinear -> MatMul or Gemm, for every reader
    halved input  the same with [x, HALF (x - DQ(Q(x)))] in x's place, two products that share one
            pass over the weights; their weighted sum is that of x in 16 bits
    embedding  Gather of INT8 rows, times Gather of the rows' scales
    input of an LM head that shares these rows  a MatMul in float before it, see `rotation`

All of it is symmetric, with zero points and axes written out. TensorRT 8 takes no INT8 initialiser:
in its form, `pairs`, the weight is stored in FP32 and goes through QuantizeLinear and
DequantizeLinear, and the embedding stays FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from ..exporter.weights import Weight
from . import blocks
from .linears import EMBEDDING, Group, Linear, groups
from .record import Tensor
from .rotation import RotatedWeights
from .smooth import HALF, Smoothing

LEVELS = 127  # of a symmetric INT8

Read = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Computed(Weight):
    """An initialiser that is computed when it is written."""

    make: Callable[[], np.ndarray] = lambda: np.zeros(0)

    def read(self) -> memoryview:
        return np.ascontiguousarray(self.make()).reshape(-1).view(np.uint8).data


@dataclass(frozen=True)
class Int8Graph:
    """A graph whose weights are inputs, and these weights."""

    model: onnx.ModelProto
    weights: list[Weight]


def to_int8(
    model: onnx.ModelProto,
    inputs: int,
    weights: RotatedWeights,
    ranges: Mapping[str, Tensor],
    smoothing: Smoothing,
    rounded: Mapping[str, np.ndarray],
    float_groups: Collection[str] = (),
    halved: Collection[str] = (),
    pairs: bool = False,
) -> Int8Graph:
    """Put Q/DQ into a traced graph, in place.

    The first `inputs` graph inputs are real ones, the others weights, whose values `weights` gives.
    ranges: by group, see `record.Tensor`; rounded: INT8 values of weights, the others are rounded
    to the nearest; float_groups: whose input is not quantised; halved: whose input is given twice.
    """
    editor = _Editor(model, inputs, weights.read, smoothing, rounded, pairs)
    linears = {
        linear.node: (group, linear) for group in groups(model.graph) for linear in group.linears
    }
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        if node.name in linears:
            group, linear = linears[node.name]
            node.input[1] = editor.weight(linear)
            if linear.weight == EMBEDDING:
                node.input[0] = editor.head_input(linear, weights.head_input())
            if group.name in float_groups:
                editor.add(node)
                continue
            scale = activation_scale(group, ranges[group.name], smoothing)
            if group.name in halved:
                editor.halves(node, linear, scale)
            else:
                node.input[0] = editor.activation(linear.name, node.input[0], scale)
                editor.add(node)
        elif node.op_type == "Gather" and node.input[0] == EMBEDDING:
            editor.embedding(node)
        else:
            editor.add(node)
    return editor.finish()


def activation_scale(group: Group, tensor: Tensor, smoothing: Smoothing) -> float:
    """The scale of a group's input after smoothing: its largest |value|, or threshold, / 127."""
    largest = tensor.threshold
    if largest is None:
        divisor = smoothing.groups.get(group.name, np.ones(1, np.float32))
        largest = float((tensor.channels / divisor).max())
    return largest / LEVELS or 1.0


def factors(
    matrix: np.ndarray, smoothing: Smoothing, linear: Linear
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a stored weight: what its rows and columns are multiplied by; scales of its outputs."""
    rows, columns = smoothing.factors(linear, matrix.shape)
    amax = blocks.largest(matrix, rows, columns, axis=1 if linear.turned else 0)
    scale = np.where(amax > 0, amax / np.float32(LEVELS), np.float32(1)).astype(np.float32)
    return rows, columns, scale


class _Editor:
    """The nodes, initialisers and weights of the graph that is being made."""

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: int,
        read: Read,
        smoothing: Smoothing,
        rounded: Mapping[str, np.ndarray],
        pairs: bool,
    ):
        self._model = model
        self._graph = graph = model.graph
        self._read = read
        self._smoothing = smoothing
        self._rounded = rounded
        self._pairs = pairs
        self._weights: dict[str, Weight] = {}
        self._dequantised: dict[str, str] = {}
        self._constants: set[str] = set()
        self._floats = [value.name for value in graph.input[inputs:]]
        del graph.input[inputs:]

    def add(self, node: onnx.NodeProto) -> None:
        self._graph.node.append(node)

    def activation(self, name: str, value: str, scale: float) -> str:
        """A value after a Q and a DQ of its own.

        ONNX Runtime on x86 makes activations unsigned before it fuses them, and only where a Q has
        one DQ as its reader and that one product.
        """
        scale_name = self._constant(f"{name}.input_scale", np.float32(scale))
        zero = self._constant(f"{name}.input_zero_point", np.int8(0))
        inputs = [value, scale_name, zero]
        self.add(_node("QuantizeLinear", name, inputs, "input_quantized"))
        inputs[0] = f"{name}.input_quantized"
        self.add(_node("DequantizeLinear", name, inputs, "input"))
        return f"{name}.input"

    def halves(self, node: onnx.NodeProto, linear: Linear, scale: float) -> None:
        """A MatMul of x [..] and of HALF times what rounding takes from x, stacked: [2, ..]."""
        name, result = linear.name, node.output[0]
        first, half = self._constant("first_axis", np.array([0], np.int64)), f"{name}.rest"
        near = self.activation(half, node.input[0], scale)
        self.add(_node("Sub", half, [node.input[0], near]))
        self.add(_node("Mul", half, [f"{half}/Sub", self._constant("half", np.float32(HALF))]))
        self.add(_node("Unsqueeze", name, [node.input[0], first]))
        self.add(_node("Unsqueeze", half, [f"{half}/Mul", first]))
        self.add(_node("Concat", name, [f"{name}/Unsqueeze", f"{half}/Unsqueeze"]))
        self._graph.node[-1].attribute.append(helper.make_attribute("axis", 0))
        node.input[0] = self.activation(name, f"{name}/Concat", scale)
        node.output[0] = f"{name}.both"
        self.add(node)
        parts = np.array([1, 1 / HALF], np.float32).reshape(2, 1, 1, 1)
        self.add(_node("Mul", f"{name}.both", [f"{name}.both", self._constant("parts", parts)]))
        total = helper.make_node("ReduceSum", [f"{name}.both/Mul", first], [result], keepdims=0)
        total.name = f"{name}/ReduceSum"
        self.add(total)

    def weight(self, linear: Linear) -> str:
        """The linear's weight, dequantised; a table that two nodes read is stored once."""
        if linear.weight in self._dequantised:
            return self._dequantised[linear.weight]
        axis = 0 if linear.turned else 1
        stored, scale = self._stored(linear)
        scope = f"{linear.name}.weight"
        scale_name = self._put(f"{linear.weight}_scale", scale)
        # One of its own: where ONNX Runtime makes a weight unsigned, it changes the zero point too.
        zero = self._constant(f"{linear.weight}_zero_point", np.zeros(len(scale), np.int8))
        if self._pairs:
            node = _node("QuantizeLinear", scope, [stored, scale_name, zero], "quantized")
            node.attribute.append(helper.make_attribute("axis", axis))
            self.add(node)
            stored = node.output[0]
        node = _node("DequantizeLinear", scope, [stored, scale_name, zero], "dequantized")
        node.attribute.append(helper.make_attribute("axis", axis))
        self.add(node)
        self._dequantised[linear.weight] = node.output[0]
        return node.output[0]

    def embedding(self, gather: onnx.NodeProto) -> None:
        """The embedding's rows, dequantised."""
        if self._pairs:
            self.add(gather)
            return
        ids = gather.input[1]
        linear = Linear("embed", gather.name, EMBEDDING, ids, turned=True)
        _, scale = self._stored(linear)
        scales = self._put(f"{EMBEDDING}_scale", scale)
        last = self._constant("last_axis", np.array([-1], np.int64))
        self.add(_node("Gather", "embed.stored", [EMBEDDING, ids]))
        cast = _node("Cast", "embed.stored", ["embed.stored/Gather"])
        cast.attribute.append(helper.make_attribute("to", TensorProto.FLOAT))
        self.add(cast)
        self.add(_node("Gather", "embed.scales", [scales, ids]))
        self.add(_node("Unsqueeze", "embed.scales", ["embed.scales/Gather", last]))
        parts = ["embed.stored/Cast", "embed.scales/Unsqueeze"]
        self.add(helper.make_node("Mul", parts, list(gather.output), "embed/Mul"))

    def head_input(self, linear: Linear, matrix: np.ndarray) -> str:
        """What the head reads, times a matrix."""
        turn = self._put(f"{linear.name}.turn", matrix)
        self.add(_node("MatMul", f"{linear.name}.turn", [linear.value, turn]))
        return f"{linear.name}.turn/MatMul"

    def finish(self) -> Int8Graph:
        """The model with all weights as inputs again, in the order in which they are read."""
        for name in self._floats:
            if name not in self._weights and any(name in node.input for node in self._graph.node):
                self._put(name, self._smoothing.vector(name, self._read(name)))
        for weight in self._weights.values():
            value = helper.make_tensor_value_info(weight.name, weight.dtype, weight.shape)
            self._graph.input.append(value)
        return Int8Graph(self._model, list(self._weights.values()))

    def _stored(self, linear: Linear) -> tuple[str, np.ndarray]:
        """Register what the file holds of a weight, INT8 or the FP32 that it stands for.

        Returns its name and the scales of its outputs.
        """
        name, matrix = linear.weight, self._read(linear.weight)
        rows, columns, scale = factors(matrix, self._smoothing, linear)
        if name not in self._weights:
            dtype = TensorProto.FLOAT if self._pairs else TensorProto.INT8
            make = partial(self._made, linear, rows, columns, scale)
            self._weights[name] = _computed(name, matrix.shape, dtype, make)
        return name, scale

    def _made(
        self, linear: Linear, rows: np.ndarray, columns: np.ndarray, scale: np.ndarray
    ) -> np.ndarray:
        """The weight in INT8, or with `pairs` what that stands for; computed when it is written."""
        whole = self._rounded.get(linear.weight)
        if whole is None:
            steps = (rows / scale, columns) if linear.turned else (rows, columns / scale)
            whole = blocks.quantised(self._read(linear.weight), *steps)
        if not self._pairs:
            return whole
        ones = np.ones(whole.shape[1 if linear.turned else 0], np.float32)
        return blocks.scaled(whole, *((scale, ones) if linear.turned else (ones, scale)))

    def _put(self, name: str, array: np.ndarray) -> str:
        """Register a small float tensor as a weight."""
        array = np.asarray(array, np.float32)
        self._weights.setdefault(
            name, _computed(name, array.shape, TensorProto.FLOAT, lambda: array)
        )
        return name

    def _constant(self, name: str, array: np.ndarray | np.generic) -> str:
        if name not in self._constants:
            self._constants.add(name)
            self._graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        return name


def _computed(
    name: str, shape: Sequence[int], dtype: int, make: Callable[[], np.ndarray]
) -> Computed:
    return Computed(name, tuple(shape), dtype, torch.empty(0), False, make)


def _node(op_type: str, scope: str, inputs: Sequence[str], result: str = "") -> onnx.NodeProto:
    output = f"{scope}.{result}" if result else f"{scope}/{op_type}"
    return helper.make_node(op_type, list(inputs), [output], f"{scope}/{op_type}")
