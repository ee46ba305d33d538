"""An ONNX file as plain records, read without the `onnx` package and without its weights.

`read_model` gives every scope of the file: the main graph, the subgraphs of its nodes, the local
functions and the subgraphs of theirs. Values of constants are read from the file when asked for.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Tuple, Union

from ...bundle import confined
from ...errors import BadInput
from ...onnxfile import BYTES, FIXED32, VARINT, Buffer, Field, Malformed, fields, mapped

if TYPE_CHECKING:
    import numpy as np

# Element types of onnx.proto by number, and how numpy stores those it has.
TYPE_NAMES = (
    "UNDEFINED FLOAT UINT8 INT8 UINT16 INT16 INT32 INT64 STRING BOOL FLOAT16 DOUBLE UINT32 UINT64 "
    "COMPLEX64 COMPLEX128 BFLOAT16 FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ UINT4 "
    "INT4 FLOAT4E2M1 FLOAT8E8M0 UINT2 INT2"
).split()
NUMPY = dict(
    FLOAT="<f4", UINT8="u1", INT8="i1", UINT16="<u2", INT16="<i2", INT32="<i4", INT64="<i8",
    BOOL="?", FLOAT16="<f2", DOUBLE="<f8", UINT32="<u4", UINT64="<u8",
)  # fmt: skip
ATTRIBUTE_KINDS = {
    1: "FLOAT", 2: "INT", 3: "STRING", 4: "TENSOR", 5: "GRAPH", 6: "FLOATS", 7: "INTS",
    8: "STRINGS", 9: "TENSORS", 10: "GRAPHS", 11: "SPARSE_TENSOR", 12: "SPARSE_TENSORS",
    13: "TYPE_PROTO", 14: "TYPE_PROTOS",
}  # fmt: skip
STANDARD = ("", "ai.onnx")
LARGEST_CONSTANT = 1 << 28  # bytes: no rule looks into a tensor beyond that

Dim = Union[int, str, None]


@dataclass(frozen=True)
class Value:
    """A named tensor as declared: dtype `` if unknown, dims None if the rank is unknown."""

    name: str
    dtype: str = ""
    dims: Optional[Tuple[Dim, ...]] = None


@dataclass(frozen=True)
class Tensor:
    """A constant: `[start, end)` of the model's file is its message, unless given holds it."""

    name: str
    dtype: str
    dims: Tuple[int, ...]
    path: Path
    start: int = 0
    end: int = 0
    given: Optional[List[Any]] = None

    @property
    def elements(self) -> int:
        count = 1
        for n in self.dims:
            count *= n
        return count

    def values(self) -> Optional[np.ndarray]:
        """The elements, flat; None for a type that numpy lacks and for a very large tensor."""
        import numpy as np

        if self.dtype not in NUMPY or self.elements * 16 > LARGEST_CONSTANT:
            return None
        dtype = np.dtype(NUMPY[self.dtype])
        if self.given is not None:
            return np.array(self.given, dtype)
        with mapped(str(self.path)) as data:
            raw = _raw(data, self.start, self.end, self.path.parent)
            if raw is not None:
                found = np.frombuffer(raw[: len(raw) // dtype.itemsize * dtype.itemsize], dtype)
            else:
                found = np.array(_typed(data, self.start, self.end, self.dtype)).astype(dtype)
        if found.size < self.elements:
            raise BadInput("%s: tensor '%s' is cut off" % (self.path, self.name))
        return found[: self.elements]


@dataclass(frozen=True)
class Attribute:
    """kind as in ATTRIBUTE_KINDS; reference: the function attribute that it stands for."""

    kind: str
    value: Any
    reference: str = ""


@dataclass(eq=False)
class Node:
    """A node and the scope it is in; its inputs may be empty strings (absent)."""

    scope: Scope
    name: str = ""
    op_type: str = ""
    domain: str = ""
    inputs: List[str] = field(default_factory=list)
    outputs: List[str] = field(default_factory=list)
    attributes: Dict[str, Attribute] = field(default_factory=dict)

    @property
    def is_standard(self) -> bool:
        return self.domain in STANDARD

    @property
    def where(self) -> str:
        """The node for a message: name (or first output), operator, and the scope it is in."""
        name = self.name or next((x for x in self.outputs if x), "")
        inside = ", " + self.scope.where if self.scope.where else ""
        return "%s (%s%s)" % (name, self.op_type, inside)

    def input(self, index: int) -> str:
        """Name of an input, empty if absent."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def get(self, attribute: str, default: Any = None) -> Any:
        """Value of an attribute."""
        found = self.attributes.get(attribute)
        return default if found is None else found.value


@dataclass(eq=False)
class Scope:
    """A graph, subgraph or function body: a place where names mean something.

    where: empty for the main graph; parent: the scope that a subgraph is in; opset: of the standard
    operators; callers: the nodes that call a function.
    """

    where: str
    parent: Optional[Scope] = None
    opset: int = 0
    nodes: List[Node] = field(default_factory=list)
    inputs: List[Value] = field(default_factory=list)
    outputs: List[Value] = field(default_factory=list)
    declared: Dict[str, Value] = field(default_factory=dict)
    initializers: Dict[str, Tensor] = field(default_factory=dict)
    producers: Dict[str, Node] = field(default_factory=dict)
    callers: List[Node] = field(default_factory=list)

    def owner(self, name: str) -> Optional[Scope]:
        """The scope, this one or one around it, in which `name` is defined."""
        scope: Optional[Scope] = self
        while scope is not None:
            if name in scope.initializers or name in scope.producers:
                return scope
            if any(value.name == name for value in scope.inputs):
                return scope
            scope = scope.parent
        return None

    def constant(self, name: str) -> Optional[Tensor]:
        """The constant behind a name, through Identity and the arguments of function calls."""
        for _ in range(100):  # as deep as anyone nests
            scope = self.owner(name) if name else None
            if scope is None:
                return None
            if name in scope.initializers:
                return scope.initializers[name]
            node = scope.producers.get(name)
            if node is None:
                return scope._argument(name)
            if node.op_type == "Constant" and node.is_standard:
                return _constant_of(node)
            if node.op_type != "Identity":
                return None
            self, name = scope, node.input(0)
        return None

    def _argument(self, name: str) -> Optional[Tensor]:
        """The constant that every caller of the function passes as `name`, the first one's."""
        index = [value.name for value in self.inputs].index(name)
        found = [caller.scope.constant(caller.input(index)) for caller in self.callers]
        return found[0] if found and all(x is not None for x in found) else None

    def dtype(self, name: str) -> str:
        """Element type of a value where the file tells it, or an empty string."""
        scope = self.owner(name)
        if scope is None:
            return ""
        if name in scope.initializers:
            return scope.initializers[name].dtype
        if name in scope.declared and scope.declared[name].dtype:
            return scope.declared[name].dtype
        node = scope.producers.get(name)
        if node is None or not node.is_standard:
            return ""
        constant = _constant_of(node) if node.op_type == "Constant" else None
        if constant is not None:
            return constant.dtype
        if node.op_type == "Cast":
            return type_name(node.get("to", 0))
        if node.op_type == "QuantizeLinear":
            return scope.dtype(node.input(2)) or type_name(node.get("output_dtype", 0)) or "UINT8"
        return ""


@dataclass(eq=False)
class Model:
    """Everything in a file: scopes holds the main graph first.

    functions by (domain, name); overloads: names that more than one function has.
    """

    path: Path
    ir_version: int = 0
    opsets: Dict[str, int] = field(default_factory=dict)
    scopes: List[Scope] = field(default_factory=list)
    functions: Dict[Tuple[str, str], Scope] = field(default_factory=dict)
    overloads: List[str] = field(default_factory=list)

    @property
    def main(self) -> Scope:
        return self.scopes[0]

    def nodes(self, *op_types: str) -> Iterator[Node]:
        """Every node of every scope, or those of some standard operators."""
        for scope in self.scopes:
            for node in scope.nodes:
                if not op_types or (node.op_type in op_types and node.is_standard):
                    yield node

    def tensors(self) -> Iterator[Tuple[Scope, Tensor]]:
        """Every constant with its scope: initialisers, and values of Constant nodes."""
        for scope in self.scopes:
            for tensor in scope.initializers.values():
                yield scope, tensor
            for node in scope.nodes:
                constant = _constant_of(node) if node.op_type == "Constant" else None
                if constant is not None:
                    yield scope, constant

    def is_call(self, node: Node) -> bool:
        """Whether the node calls a local function."""
        return (node.domain, node.op_type) in self.functions


def _constant_of(node: Node) -> Optional[Tensor]:
    """The tensor of a Constant node, whichever of its attributes holds it; named as its output."""
    for attribute, dtype in (("int", "INT64"), ("float", "FLOAT")):
        for suffix in ("", "s"):
            given = node.get("value_%s%s" % (attribute, suffix))
            if given is not None:
                values = given if suffix else [given]
                dims = (len(values),) if suffix else ()
                return Tensor(node.outputs[0], dtype, dims, Path(), given=values)
    value = node.get("value")
    return dataclasses.replace(value, name=node.outputs[0]) if isinstance(value, Tensor) else None


def type_name(number: int) -> str:
    """Name of an element type; an empty string for an undefined one."""
    known = 0 < number < len(TYPE_NAMES)
    return TYPE_NAMES[number] if known else ("TYPE_%d" % number if number else "")


# ---------------------------------------------------------------------------------- reading


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
                model.ir_version = _number(data, f)
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
    texts = {f.number: _text(data, f) for f in found if f.kind == BYTES and f.number in (1, 10)}
    name, domain = texts.get(1, ""), texts.get(10, "")
    scope = Scope("function %s::%s" % (domain, name), opset=opset)
    for f in found:
        if f.number == 9 and f.kind == BYTES:
            imported, version = _opset(data, f)
            if imported in STANDARD:
                scope.opset = version
        elif f.number == 4 and f.kind == BYTES:
            scope.inputs.append(Value(_text(data, f)))
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
            (node.inputs if f.number == 1 else node.outputs).append(_text(data, f))
        elif f.number in (3, 4, 7):
            setattr(node, {3: "name", 4: "op_type", 7: "domain"}[f.number], _text(data, f))
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
    name = _text(data, last[1]) if 1 in last else ""
    kind = ATTRIBUTE_KINDS.get(_number(data, last[20]) if 20 in last else 0, "")
    value: Any = None
    if kind == "FLOAT":
        value = ([0.0] + _floats(data, by_number.get(2, [])))[-1]
    elif kind == "INT":
        value = _number(data, last[3]) if 3 in last else 0
    elif kind == "STRING":
        value = _text(data, last[4]) if 4 in last else ""
    elif kind == "FLOATS":
        value = _floats(data, by_number.get(7, []))
    elif kind == "INTS":
        value = _numbers(data, by_number.get(8, []))
    elif kind == "STRINGS":
        value = [_text(data, f) for f in by_number.get(9, [])]
    elif kind == "TENSOR" and 5 in last:
        value = _tensor(data, last[5], model.path)
    elif kind in ("GRAPH", "GRAPHS"):
        value = []
        for f in by_number.get(6 if kind == "GRAPH" else 11, []):
            title = "%s of %s" % (name, node.name or node.op_type)
            where = ", ".join(filter(None, (title, node.scope.where)))
            value.append(Scope(where, node.scope, node.scope.opset))
            _read_graph(data, f, value[-1], model)
    node.attributes[name] = Attribute(kind, value, _text(data, last[21]) if 21 in last else "")


def _tensor(data: Buffer, message: Field, path: Path) -> Tensor:
    dims: List[Field] = []
    name, dtype = "", 0
    for f in fields(data, message.body, message.end):
        if f.number == 1:
            dims.append(f)
        elif f.number == 2 and f.kind == VARINT:
            dtype = _number(data, f)
        elif f.number == 8 and f.kind == BYTES:
            name = _text(data, f)
    sizes = tuple(_numbers(data, dims))
    return Tensor(name, type_name(dtype), sizes, path, message.body, message.end)


def _raw(data: Buffer, start: int, end: int, folder: Path) -> Optional[bytes]:
    """A tensor's bytes, from its own message or another file of the folder."""
    entries: Dict[str, str] = {}
    for f in fields(data, start, end):
        if f.number == 9 and f.kind == BYTES:
            return bytes(data[f.body : f.end])
        if f.number == 13 and f.kind == BYTES:
            entry = {x.number: _text(data, x) for x in fields(data, f.body, f.end)}
            entries[entry.get(1, "")] = entry.get(2, "")
    if "location" not in entries:
        return None
    path = confined(folder, entries["location"])
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", "-1"))
    except ValueError as error:
        raise BadInput("%s: an external tensor has a damaged offset" % folder) from error
    with path.open("rb") as stream:
        stream.seek(max(offset, 0))
        return stream.read(length if 0 <= length <= LARGEST_CONSTANT else LARGEST_CONSTANT)


def _typed(data: Buffer, start: int, end: int, dtype: str) -> List[Any]:
    """The elements of a tensor that are stored one by one in a field for their type."""
    number = {"FLOAT": 4, "DOUBLE": 10, "INT64": 7, "UINT32": 11, "UINT64": 11}.get(dtype, 5)
    found = [f for f in fields(data, start, end) if f.number == number]
    if dtype == "FLOAT":
        return _floats(data, found)
    if dtype == "DOUBLE":
        packed = b"".join(bytes(data[f.body : f.end]) for f in found)
        return list(struct.unpack("<%dd" % (len(packed) // 8), packed[: len(packed) // 8 * 8]))
    numbers = _numbers(data, found)
    if dtype == "FLOAT16":  # as the bits of uint16
        bits = struct.pack("<%dH" % len(numbers), *(n & 0xFFFF for n in numbers))
        return list(struct.unpack("<%de" % len(numbers), bits))
    return numbers


def _value(data: Buffer, message: Field) -> Value:
    name, dtype = "", 0
    dims: Optional[Tuple[Dim, ...]] = None
    for f in fields(data, message.body, message.end):
        if f.number == 1 and f.kind == BYTES:
            name = _text(data, f)
        elif f.number == 2 and f.kind == BYTES:  # type
            for t in fields(data, f.body, f.end):
                if t.number == 1 and t.kind == BYTES:  # tensor_type
                    for x in fields(data, t.body, t.end):
                        if x.number == 1 and x.kind == VARINT:
                            dtype = _number(data, x)
                        elif x.number == 2 and x.kind == BYTES:
                            dims = tuple(_dims(data, x))
    return Value(name, type_name(dtype), dims)


def _dims(data: Buffer, shape: Field) -> Iterator[Dim]:
    for f in fields(data, shape.body, shape.end):
        if f.number == 1 and f.kind == BYTES:
            size: Dim = None
            for x in fields(data, f.body, f.end):
                if x.number == 1 and x.kind == VARINT:
                    size = _number(data, x)
                elif x.number == 2 and x.kind == BYTES:
                    size = _text(data, x) or None
            yield size


def _opset(data: Buffer, message: Field) -> Tuple[str, int]:
    domain, version = "", 0
    for f in fields(data, message.body, message.end):
        if f.number == 1 and f.kind == BYTES:
            domain = _text(data, f)
        elif f.number == 2 and f.kind == VARINT:
            version = _number(data, f)
    return domain, version


def _text(data: Buffer, f: Field) -> str:
    return bytes(data[f.body : f.end]).decode("utf-8", "replace")


def _number(data: Buffer, f: Field) -> int:
    """A varint as a signed 64-bit integer."""
    if f.kind != VARINT:
        raise Malformed("a number is stored as something else")
    return _varints(bytes(data[f.body : f.end]))[-1]


def _numbers(data: Buffer, found: List[Field]) -> List[int]:
    """The integers of a repeated field, packed or not."""
    return [x for f in found for x in _varints(bytes(data[f.body : f.end]))]


def _varints(raw: bytes) -> List[int]:
    out, value, shift = [], 0, 0
    for byte in raw:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            value &= (1 << 64) - 1
            out.append(value - (1 << 64) if value >> 63 else value)
            value = shift = 0
    return out


def _floats(data: Buffer, found: List[Field]) -> List[float]:
    packed = b"".join(bytes(data[f.body : f.end]) for f in found if f.kind in (BYTES, FIXED32))
    return list(struct.unpack("<%df" % (len(packed) // 4), packed[: len(packed) // 4 * 4]))
