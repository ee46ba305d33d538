"""Reads an ONNX file into the records of `graph`, without the `onnx` package and its weights.

`read_model` gives every scope of the file: the main graph, the subgraphs of its nodes, the local
functions and the subgraphs of theirs. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ...errors import BadInput
from ...onnxfile import BYTES, VARINT, Buffer, Field, fields, mapped
from .graph import STANDARD, Attribute, Dim, Model, Node, Scope, Tensor, Value, type_name
from .wire import floats, number, numbers, text

ATTRIBUTE_KINDS = {
    1: "FLOAT", 2: "INT", 3: "STRING", 4: "TENSOR", 5: "GRAPH", 6: "FLOATS", 7: "INTS",
    8: "STRINGS", 9: "TENSORS", 10: "GRAPHS", 11: "SPARSE_TENSOR", 12: "SPARSE_TENSORS",
    13: "TYPE_PROTO", 14: "TYPE_PROTOS",
}  # fmt: skip


def read_model(path: Path) -> Model:
    """Read an ONNX file; raises BadInput for what is none, and one that needs missing files."""
    model = Model(path)
    try:
        _read(path, model)
    except RecursionError as error:
        raise BadInput("%s: its subgraphs nest too deeply" % path) from error
    for node in model.nodes():
        if model.is_call(node):
            model.functions[node.domain, node.op_type].callers.append(node)
    return model


def _read(path: Path, model: Model) -> None:
    with mapped(str(path)) as data:
        top = list(fields(data, 0, len(data)))
        for f in top:
            if f.number == 1 and f.kind == VARINT:
                model.ir_version = number(data, f)
            elif f.number == 8 and f.kind == BYTES:
                domain, version = _opset(data, f)
                model.opsets[domain] = version
        graphs = [f for f in top if f.number == 7 and f.kind == BYTES]
        if not graphs or not model.opsets:
            raise BadInput("%s: not an ONNX model: it has no graph or no opset" % path)
        opset = model.opsets.get("", model.opsets.get("ai.onnx", 0))
        _read_graph(data, graphs[-1], Scope("", opset=opset), model)
        for f in top:
            if f.number == 25 and f.kind == BYTES:
                _read_function(data, f, opset, model)


def _read_graph(data: Buffer, graph: Field, scope: Scope, model: Model) -> None:
    model.scopes.append(scope)
    for f in fields(data, graph.body, graph.end):
        if f.kind != BYTES:
            continue
        if f.number == 1:
            _add_node(data, f, scope, model)
        elif f.number == 5:
            tensor = _tensor(data, f, model.path)
            scope.initializers[tensor.name] = tensor
        elif f.number in (11, 12, 13):
            value = _value(data, f)
            scope.declared[value.name] = value
            if f.number != 13:
                (scope.inputs if f.number == 11 else scope.outputs).append(value)


def _read_function(data: Buffer, function: Field, opset: int, model: Model) -> None:
    found = list(fields(data, function.body, function.end))
    texts = {f.number: text(data, f) for f in found if f.kind == BYTES and f.number in (1, 10)}
    name, domain = texts.get(1, ""), texts.get(10, "")
    scope = Scope("function %s::%s" % (domain, name), opset=opset)
    for f in found:
        if f.number == 9 and f.kind == BYTES:
            imported, version = _opset(data, f)
            if imported in STANDARD:
                scope.opset = version
        elif f.number == 4 and f.kind == BYTES:
            scope.inputs.append(Value(text(data, f)))
        elif f.number == 12 and f.kind == BYTES:
            value = _value(data, f)
            scope.declared[value.name] = value
    model.scopes.append(scope)
    for f in found:
        if f.number == 7 and f.kind == BYTES:
            _add_node(data, f, scope, model)
    if (domain, name) in model.functions:
        model.overloads.append("%s::%s" % (domain, name))
    model.functions[domain, name] = scope


def _add_node(data: Buffer, message: Field, scope: Scope, model: Model) -> None:
    node = Node(scope)
    found = [f for f in fields(data, message.body, message.end) if f.kind == BYTES]
    for f in found:
        if f.number in (1, 2):
            (node.inputs if f.number == 1 else node.outputs).append(text(data, f))
        elif f.number in (3, 4, 7):
            setattr(node, {3: "name", 4: "op_type", 7: "domain"}[f.number], text(data, f))
    scope.nodes.append(node)
    scope.producers.update((name, node) for name in node.outputs if name)
    for f in found:
        if f.number == 5:
            _add_attribute(data, f, node, model)


def _add_attribute(data: Buffer, message: Field, node: Node, model: Model) -> None:
    found = list(fields(data, message.body, message.end))
    by_number: Dict[int, List[Field]] = {}
    for f in found:
        by_number.setdefault(f.number, []).append(f)
    last = {number: group[-1] for number, group in by_number.items()}
    name = text(data, last[1]) if 1 in last else ""
    kind = ATTRIBUTE_KINDS.get(number(data, last[20]) if 20 in last else 0, "")
    value: Any = None
    if kind == "FLOAT":
        value = ([0.0] + floats(data, by_number.get(2, [])))[-1]
    elif kind == "INT":
        value = number(data, last[3]) if 3 in last else 0
    elif kind == "STRING":
        value = text(data, last[4]) if 4 in last else ""
    elif kind == "FLOATS":
        value = floats(data, by_number.get(7, []))
    elif kind == "INTS":
        value = numbers(data, by_number.get(8, []))
    elif kind == "STRINGS":
        value = [text(data, f) for f in by_number.get(9, [])]
    elif kind == "TENSOR" and 5 in last:
        value = _tensor(data, last[5], model.path)
    elif kind in ("GRAPH", "GRAPHS"):
        value = []
        for f in by_number.get(6 if kind == "GRAPH" else 11, []):
            title = "%s of %s" % (name, node.name or node.op_type)
            where = ", ".join(filter(None, (title, node.scope.where)))
            value.append(Scope(where, node.scope, node.scope.opset))
            _read_graph(data, f, value[-1], model)
    node.attributes[name] = Attribute(kind, value, text(data, last[21]) if 21 in last else "")


def _tensor(data: Buffer, message: Field, path: Path) -> Tensor:
    dims: List[Field] = []
    name, dtype = "", 0
    for f in fields(data, message.body, message.end):
        if f.number == 1:
            dims.append(f)
        elif f.number == 2 and f.kind == VARINT:
            dtype = number(data, f)
        elif f.number == 8 and f.kind == BYTES:
            name = text(data, f)
    sizes = tuple(numbers(data, dims))
    return Tensor(name, type_name(dtype), sizes, path, message.body, message.end)


def _value(data: Buffer, message: Field) -> Value:
    name, dtype = "", 0
    dims: Optional[Tuple[Dim, ...]] = None
    for f in fields(data, message.body, message.end):
        if f.number == 1 and f.kind == BYTES:
            name = text(data, f)
        elif f.number == 2 and f.kind == BYTES:  # type
            for t in fields(data, f.body, f.end):
                if t.number == 1 and t.kind == BYTES:  # tensor_type
                    for x in fields(data, t.body, t.end):
                        if x.number == 1 and x.kind == VARINT:
                            dtype = number(data, x)
                        elif x.number == 2 and x.kind == BYTES:
                            dims = tuple(_dims(data, x))
    return Value(name, type_name(dtype), dims)


def _dims(data: Buffer, shape: Field) -> Iterator[Dim]:
    for f in fields(data, shape.body, shape.end):
        if f.number == 1 and f.kind == BYTES:
            size: Dim = None
            for x in fields(data, f.body, f.end):
                if x.number == 1 and x.kind == VARINT:
                    size = number(data, x)
                elif x.number == 2 and x.kind == BYTES:
                    size = text(data, x) or None
            yield size


def _opset(data: Buffer, message: Field) -> Tuple[str, int]:
    domain, version = "", 0
    for f in fields(data, message.body, message.end):
        if f.number == 1 and f.kind == BYTES:
            domain = text(data, f)
        elif f.number == 2 and f.kind == VARINT:
            version = number(data, f)
    return domain, version
