"""A small builder of ONNX graphs: operator bodies are written with it as expressions.

`b.Add(x, 1)` appends a node and returns the name of its output. Names are strings; Python values
become constants: an int is an int32 scalar (index arithmetic), a float a float32 scalar, a list an
int64 vector (shapes, axes, starts). Asking twice for the same expression gives the same node, so
that helpers can be called wherever they are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 20
INT64, INT32, FLOAT, FLOAT16, INT8 = (
    TensorProto.INT64,
    TensorProto.INT32,
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.INT8,
)


class Body:
    """The nodes of a function, or of one branch of an If inside it."""

    def __init__(self, outer: Body | None = None) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._outer = outer
        self._known: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._numbers: itertools.count[int] = outer._numbers if outer else itertools.count()

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **options: self.node(op_type, *inputs, **options)

    def node(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Append a node; the name of its output, or a tuple of names where outputs > 1.

        inputs: names and Python values (see the module's text); attributes: as ONNX names them.
        """
        names = tuple(x if isinstance(x, str) else self.constant(x) for x in inputs)
        key = (op_type, names, outputs, repr(sorted(attributes.items())))
        found = self._find(key)
        if found is None:
            found = tuple(self._name() for _ in range(outputs))
            self.nodes.append(helper.make_node(op_type, names, found, **attributes))
            self._known[key] = found
        return found if outputs > 1 else found[0]

    def constant(self, value: Any, dtype: Any = None) -> str:
        """The name of a constant, in this graph: ONNX Runtime merges the equal constants of all
        functions, and then what is computed from them, only where no branch uses them."""
        if dtype is None:
            dtype = {int: np.int32, float: np.float32, list: np.int64}[type(value)]
        array = np.array(value, dtype)
        key = ("Constant", array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = (self._name(),)
            tensor = numpy_helper.from_array(array)
            self.nodes.append(helper.make_node("Constant", [], self._known[key], value=tensor))
        return self._known[key][0]

    def branch(self) -> Body:
        """A graph inside this one, for `choose`: it can use every name this one has by then."""
        return Body(self)

    def choose(self, condition: str, then: Branch, otherwise: Branch) -> tuple[str, ...]:
        """If: the values of one branch or of the other, each a body and the names of its values."""
        graphs = [
            helper.make_graph(body.nodes, name, [], [onnx.ValueInfoProto(name=x) for x in values])
            for name, (body, values) in (("then", then), ("otherwise", otherwise))
        ]
        results = tuple(self._name() for _ in then[1])
        self.nodes.append(
            helper.make_node(
                "If", [condition], results, then_branch=graphs[0], else_branch=graphs[1]
            )
        )
        return results

    # ------------------------------------------------------------------------------- shorthands

    def cast(self, x: str, to: int) -> str:
        return self.node("Cast", x, to=to)

    def size(self, x: str, axis: int) -> str:
        """Length of one axis: int64 [1], as shapes are made of."""
        return self.node("Shape", x, start=axis, end=axis + 1)

    def count(self, x: str, axis: int) -> str:
        """Length of one axis: int32 scalar, for index arithmetic."""
        return self.cast(self.Squeeze(self.size(x, axis), [0]), INT32)

    def range(self, length: str | int) -> str:
        """int32 [length]: 0, 1, 2, ...; length is an int or an int32 scalar."""
        if isinstance(length, int):
            length = self.constant(length)
        return self.node("Range", 0, length, 1)

    def shape(self, *sizes: str | int) -> str:
        """A shape from ints and int64 [1] sizes: int64 [n]."""
        if all(isinstance(x, int) for x in sizes):
            return self.constant(list(sizes))
        return self.node("Concat", *([x] if isinstance(x, int) else x for x in sizes), axis=0)

    def reshape(self, x: str, *sizes: str | int) -> str:
        """Reshape; 0 keeps the size of that axis, -1 is what remains."""
        return self.node("Reshape", x, self.shape(*sizes))

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self.node("Unsqueeze", x, list(axes))

    def transpose(self, x: str, *order: int) -> str:
        return self.node("Transpose", x, perm=list(order))

    # -----------------------------------------------------------------------------------------

    def _find(self, key: tuple[Any, ...]) -> tuple[str, ...] | None:
        return self._known.get(key) or (self._outer._find(key) if self._outer else None)

    def _name(self) -> str:
        return f"v{next(self._numbers)}"


Branch = tuple[Body, Sequence[str]]


def function(
    domain: str,
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Sequence[str],
    body: Body,
    values: Sequence[str],
) -> onnx.FunctionProto:
    """The model-local function that computes `values` with the body's nodes, as its `outputs`."""
    results: dict[str, str] = {}
    for value, output in zip(values, outputs, strict=True):
        if value in inputs:
            body.nodes.append(helper.make_node("Identity", [value], [output]))
        else:
            results[value] = output
    _rename(body.nodes, results)
    imports = [helper.make_opsetid("", OPSET)]
    return helper.make_function(
        domain, name, list(inputs), list(outputs), body.nodes, imports, list(attributes)
    )


def _rename(nodes: Iterable[onnx.NodeProto], names: dict[str, str]) -> None:
    for node in nodes:
        node.input[:] = [names.get(x, x) for x in node.input]
        node.output[:] = [names.get(x, x) for x in node.output]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g.node, names)
