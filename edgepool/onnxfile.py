"""ONNX files as protobuf: read without the `onnx` package, and without reading their weights.

A model file can be gigabytes of weights around a few hundred kilobytes of graph. `fields` walks the
encoding (protobuf.dev/programming-guides/encoding), `skeleton` gives the graph with every large
initialiser as a reference to its bytes in the same file or another, `places` says where those bytes
are, and `external_locations` lists the files that a model takes weights from, so that a caller can
refuse one outside its folder.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

from .errors import BadInput

# Field numbers of onnx.proto, by message.
MODEL_GRAPH = 7
GRAPH_INITIALIZER = 5
TENSOR_NAME, TENSOR_RAW_DATA, TENSOR_EXTERNAL_DATA, TENSOR_DATA_LOCATION = 8, 9, 13, 14
ENTRY_KEY, ENTRY_VALUE = 1, 2

# Where messages hold messages that can hold tensors: message -> field -> message.
_HOLDS_TENSORS = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

# Types of the graphs' inputs and outputs as ONNX Runtime calls them, and as NumPy does.
NUMPY_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int8)": "int8",
    "tensor(int32)": "int32",
}

Buffer = Union[bytes, mmap.mmap]


class Malformed(ValueError):
    """The bytes are no protobuf message."""


class Field(NamedTuple):
    """One field of a message: [start, end) is all of it, [body, end) its content (`BYTES` only)."""

    number: int
    kind: int
    start: int
    body: int
    end: int


def varint(value: int) -> bytes:
    """A non-negative integer in base 128, low group first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def header(number: int, length: int) -> bytes:
    """What precedes `length` bytes of content in field `number`."""
    return varint(number << 3 | BYTES) + varint(length)


def fields(data: Buffer, start: int, end: int) -> Iterator[Field]:
    """The fields of the message in data[start:end]; raises Malformed where it is no protobuf."""
    position = start
    while position < end:
        first = position
        tag, position = _read_varint(data, position, end)
        kind, body = tag & 7, position
        if kind == VARINT:
            _, position = _read_varint(data, position, end)
        elif kind == BYTES:
            length, body = _read_varint(data, position, end)
            position = body + length
        elif kind in (FIXED32, FIXED64):
            position += 4 if kind == FIXED32 else 8
        else:
            raise Malformed("unknown wire type %d" % kind)
        if position > end:
            raise Malformed("a field is cut off")
        yield Field(tag >> 3, kind, first, body, position)


def _read_varint(data: Buffer, position: int, end: int) -> Tuple[int, int]:
    value, shift = 0, 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise Malformed("a field is cut off")


@dataclass
class Summary:
    """What a model file says about itself; operators counts nodes by `domain::OpType`."""

    ir_version: int = 0
    opsets: Dict[str, int] = field(default_factory=dict)
    inputs: List[str] = field(default_factory=list)
    outputs: List[str] = field(default_factory=list)
    operators: Dict[str, int] = field(default_factory=dict)
    functions: List[str] = field(default_factory=list)
    initializers: int = 0
    external: List[str] = field(default_factory=list)


def summary(path: str) -> Summary:
    """Read opsets, inputs, outputs and operators of a model; no weight is read."""
    result = Summary(external=sorted(external_locations(path)))
    with mapped(path) as data:
        for f in fields(data, 0, len(data)):
            if f.number == 1 and f.kind == VARINT:
                result.ir_version = _read_varint(data, f.body, f.end)[0]
            elif f.number == 8 and f.kind == BYTES:  # opset_import
                parts = _leaves(data, f)
                result.opsets[_text(parts.get(1))] = int(parts.get(2, 0))
            elif f.number == 25 and f.kind == BYTES:  # functions
                result.functions.append(_text(_leaves(data, f).get(1)))
            elif f.number == MODEL_GRAPH and f.kind == BYTES:
                _summarise_graph(data, f, result)
    result.operators = dict(sorted(result.operators.items(), key=lambda x: (-x[1], x[0])))
    return result


def _summarise_graph(data: Buffer, graph: Field, result: Summary) -> None:
    for f in fields(data, graph.body, graph.end):
        if f.kind != BYTES:
            continue
        if f.number == 1:  # node
            parts = _leaves(data, f)
            domain, op_type = _text(parts.get(7)), _text(parts.get(4))
            name = "%s::%s" % (domain, op_type) if domain else op_type
            result.operators[name] = result.operators.get(name, 0) + 1
        elif f.number == GRAPH_INITIALIZER:
            result.initializers += 1
        elif f.number in (11, 12):  # input, output
            names = result.inputs if f.number == 11 else result.outputs
            names.append(_text(_leaves(data, f).get(1)))


def _leaves(data: Buffer, message: Field) -> Dict[int, Union[int, bytes]]:
    """The last value of each field of a small message, as a number or as bytes."""
    found: Dict[int, Union[int, bytes]] = {}
    for f in fields(data, message.body, message.end):
        if f.kind == VARINT:
            found[f.number] = _read_varint(data, f.body, f.end)[0]
        elif f.kind == BYTES:
            found[f.number] = bytes(data[f.body : f.end])
    return found


def _text(value: Union[int, bytes, None]) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def external_locations(path: str) -> Set[str]:
    """Every external-data location that the tensors of a model name, as written there."""
    found: Set[str] = set()
    with mapped(path) as data:
        pending: List[Tuple[str, int, int]] = [("model", 0, len(data))]
        while pending:
            message, start, end = pending.pop()
            if message == "tensor":
                found.update(_location(data, start, end))
                continue
            holds = _HOLDS_TENSORS[message]
            for f in fields(data, start, end):
                if f.number in holds and f.kind == BYTES:
                    pending.append((holds[f.number], f.body, f.end))
    return found


def _location(data: Buffer, start: int, end: int) -> Iterator[str]:
    entries = _external_entries(data, start, end)
    if "location" in entries:
        yield entries["location"]


def _external_entries(data: Buffer, start: int, end: int) -> Dict[str, str]:
    """What a tensor says of its external data: location, offset, length."""
    entries = {}
    for f in fields(data, start, end):
        if f.number == TENSOR_EXTERNAL_DATA and f.kind == BYTES:
            parts = _leaves(data, f)
            entries[_text(parts.get(ENTRY_KEY))] = _text(parts.get(ENTRY_VALUE))
    return entries


class Place(NamedTuple):
    """Where a tensor's bytes are: `length` (-1 where that is not said) at `offset` of a file."""

    location: str
    offset: int
    length: int


def places(path: str, larger_than: int = 1024) -> Dict[str, Place]:
    """Where each initialiser is, by name: beside the model file, or in it if it has more bytes.

    Raises BadInput for what is no ONNX file, or a damaged one.
    """
    found: Dict[str, Place] = {}
    own = os.path.basename(path)
    with mapped(path) as data:
        for graph in fields(data, 0, len(data)):
            if graph.number != MODEL_GRAPH or graph.kind != BYTES:
                continue
            for f in fields(data, graph.body, graph.end):
                if f.number == GRAPH_INITIALIZER and f.kind == BYTES:
                    name, place = _place(data, f, own)
                    if place and (place.location != own or place.length > larger_than):
                        found[name] = place
    return found


def _place(data: Buffer, tensor: Field, location: str) -> Tuple[str, Optional[Place]]:
    """Name and place of an initialiser; no place where its values are not bytes."""
    name, place = "", None
    for f in fields(data, tensor.body, tensor.end):
        if f.number == TENSOR_NAME and f.kind == BYTES:
            name = bytes(data[f.body : f.end]).decode("utf-8", "replace")
        elif f.number == TENSOR_RAW_DATA and f.kind == BYTES:
            place = Place(location, f.body, f.end - f.body)
    entries = _external_entries(data, tensor.body, tensor.end)
    if "location" in entries:
        offset, length = entries.get("offset", "0"), entries.get("length", "-1")
        try:
            place = Place(entries["location"], int(offset), int(length))
        except ValueError as error:
            raise Malformed("an offset or a length is no number") from error
    return name, place


def skeleton(
    path: str, larger_than: int = 1024, elsewhere: Optional[Mapping[str, Place]] = None
) -> bytes:
    """The serialised model with initialisers of more bytes as external data in the file itself.

    elsewhere: other places, by name of the initialiser. The result has to be loaded with `path`'s
    folder as the base of its external data.
    """
    location, moved = os.path.basename(path), elsewhere or {}
    with mapped(path) as data:
        out: List[bytes] = []
        for f in fields(data, 0, len(data)):
            if f.number == MODEL_GRAPH and f.kind == BYTES:
                graph = b"".join(_graph_parts(data, f, location, larger_than, moved))
                out += [header(MODEL_GRAPH, len(graph)), graph]
            else:
                out.append(bytes(data[f.start : f.end]))
    return b"".join(out)


def _graph_parts(
    data: Buffer, graph: Field, location: str, larger_than: int, moved: Mapping[str, Place]
) -> Iterator[bytes]:
    for f in fields(data, graph.body, graph.end):
        place = None
        if f.number == GRAPH_INITIALIZER and f.kind == BYTES:
            name, place = _place(data, f, location)
            inline = place is not None and f.end - f.body > place.length > larger_than
            place = moved.get(name, place if inline else None)
        if place is None:
            yield bytes(data[f.start : f.end])
        else:
            tensor = b"".join(_tensor_parts(data, f, place))
            yield header(GRAPH_INITIALIZER, len(tensor)) + tensor


def _tensor_parts(data: Buffer, tensor: Field, place: Place) -> Iterator[bytes]:
    """A tensor with its bytes in another place."""
    replaced = (TENSOR_RAW_DATA, TENSOR_EXTERNAL_DATA, TENSOR_DATA_LOCATION)
    for f in fields(data, tensor.body, tensor.end):
        if f.number not in replaced:
            yield bytes(data[f.start : f.end])
    yield external_reference(*place)


def external_reference(location: str, offset: int, length: int) -> bytes:
    """The fields of a TensorProto whose data is `length` bytes at `offset` of a file."""
    out = b""
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = b"".join(
            header(number, len(text)) + text
            for number, text in ((ENTRY_KEY, key.encode()), (ENTRY_VALUE, value.encode()))
        )
        out += header(TENSOR_EXTERNAL_DATA, len(entry)) + entry
    return out + varint(TENSOR_DATA_LOCATION << 3 | VARINT) + varint(1)


@contextlib.contextmanager
def mapped(path: str) -> Iterator[mmap.mmap]:
    """A file's bytes, mapped read-only; BadInput for what is no file or no protobuf."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BadInput("%s: %s" % (path, (error.strerror or str(error)).lower())) from error
    except ValueError as error:
        raise BadInput("%s: the file is empty" % path) from error
    with data:
        try:
            yield data
        except Malformed as error:
            raise BadInput("%s: not an ONNX file, or a damaged one" % path) from error
