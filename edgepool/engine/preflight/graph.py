"""An ONNX file as plain records: what `read` makes and the rules look at.

Values of constants are read from the file when they are asked for.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Tuple, Union

from ...bundle import confined
from ...errors import BadInput
from ...onnxfile import BYTES, Buffer, fields, mapped
from .wire import floats, numbers, text

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

    def get(self, attribute: str, default: Any) -> Any:
        """Value of an attribute; the default too where it has another type than the default."""
        found = self.attributes.get(attribute)
        return found.value if found and isinstance(found.value, type(default)) else default

    def graphs(self, attribute: str) -> List[Scope]:
        """The graph in an attribute, in a list; empty where there is none."""
        found = self.attributes.get(attribute)
        return found.value if found is not None and found.kind == "GRAPH" else []


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
    name = node.outputs[0] if node.outputs else ""
    for attribute in node.attributes.values():
        if attribute.kind == "TENSOR" and attribute.value is not None:
            return dataclasses.replace(attribute.value, name=name)
        if attribute.kind in ("INT", "INTS", "FLOAT", "FLOATS"):
            several = attribute.kind.endswith("S")
            given = attribute.value if several else [attribute.value]
            dtype = "INT64" if attribute.kind.startswith("INT") else "FLOAT"
            return Tensor(name, dtype, (len(given),) if several else (), Path(), given=given)
    return None


def type_name(number: int) -> str:
    """Name of an element type; an empty string for an undefined one."""
    known = 0 < number < len(TYPE_NAMES)
    return TYPE_NAMES[number] if known else ("TYPE_%d" % number if number else "")


def _raw(data: Buffer, start: int, end: int, folder: Path) -> Optional[bytes]:
    """A tensor's bytes, from its own message or another file of the folder."""
    entries: Dict[str, str] = {}
    for f in fields(data, start, end):
        if f.number == 9 and f.kind == BYTES:
            return bytes(data[f.body : f.end])
        if f.number == 13 and f.kind == BYTES:
            entry = {x.number: text(data, x) for x in fields(data, f.body, f.end)}
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
        return floats(data, found)
    if dtype == "DOUBLE":
        packed = b"".join(bytes(data[f.body : f.end]) for f in found)
        return list(struct.unpack("<%dd" % (len(packed) // 8), packed[: len(packed) // 8 * 8]))
    integers = numbers(data, found)
    if dtype == "FLOAT16":  # as the bits of uint16
        bits = struct.pack("<%dH" % len(integers), *(n & 0xFFFF for n in integers))
        return list(struct.unpack("<%de" % len(integers), bits))
    return integers
