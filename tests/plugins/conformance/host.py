"""Plugins of a library, called as TensorRT calls them: what harness.cpp does, for Python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.plugins import emulated
from tests.plugins.conformance import build

INT, SIZE, TEXT, POINTER = ctypes.c_int32, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p

# Of nvinfer1, by value.
DATA_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.int8): 2,
              np.dtype(np.int32): 3}  # fmt: skip
LINEAR = 0  # TensorFormat
FLOAT32, INT32, CHAR = 1, 5, 6  # PluginFieldType
FIELD_TYPES = {int: INT32, float: FLOAT32, str: CHAR}
ERROR = 1  # ILogger::Severity
ENTRIES = {3: "getCreators", 2: "getPluginCreators"}  # by interface


class Crash(AssertionError):
    """A plugin did what would have ended the process."""


class Dims(ctypes.Structure):
    _fields_ = [("rank", INT), ("sizes", ctypes.c_int64 * 8)]


class TensorDesc(ctypes.Structure):
    _fields_ = [("dims", Dims), ("type", INT), ("format", INT), ("scale", ctypes.c_float)]


class DynamicDesc(ctypes.Structure):
    _fields_ = [("desc", TensorDesc), ("min", Dims), ("max", Dims), ("opt", Dims)]


class PluginField(ctypes.Structure):
    _fields_ = [("name", TEXT), ("data", POINTER), ("type", INT), ("length", INT)]


class FieldCollection(ctypes.Structure):
    _fields_ = [("count", INT), ("fields", ctypes.POINTER(PluginField))]


@dataclass(frozen=True)
class Field:
    """An attribute as a parser hands it over. data: None for a null pointer."""

    name: str | None
    type: int
    data: bytes | None
    length: int

    @staticmethod
    def of(name: str, value: int | float | str) -> Field:
        """As the ONNX parser does: a string has a length and no terminator."""
        if isinstance(value, str):
            return Field(name, CHAR, value.encode() + b"?", len(value.encode()))
        kind = np.int32 if isinstance(value, int) else np.float32
        return Field(name, FIELD_TYPES[type(value)], np.array(value, kind).tobytes(), 1)


def fields_of(attributes: dict[str, Any]) -> list[Field]:
    return [Field.of(name, value) for name, value in attributes.items()]


def dims(shape: Sequence[int]) -> Dims:
    return Dims(len(shape), (ctypes.c_int64 * 8)(*shape))


def tensor(shape: Sequence[int], type_: int, format_: int = LINEAR) -> TensorDesc:
    return TensorDesc(dims(shape), type_, format_, 1.0)


def dynamic(desc: TensorDesc, most: Sequence[int] | None = None) -> DynamicDesc:
    """The description of a tensor in a profile: sizes up to `most` (as they are, if not given)."""
    smallest = Dims(desc.dims.rank, desc.dims.sizes)
    largest = desc.dims if most is None else dims(most)
    return DynamicDesc(desc, smallest, largest, desc.dims)


def describe(arrays: Iterable[np.ndarray]) -> list[TensorDesc]:
    return [tensor(a.shape, DATA_TYPES[a.dtype]) for a in arrays]


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "host_open": (POINTER, [TEXT, TEXT]),
    "host_crash": (TEXT, []),
    "host_messages": (INT, []),
    "host_message": (TEXT, [INT, ctypes.POINTER(INT)]),
    "host_forget_messages": (None, []),
    "creator_count": (INT, [POINTER]),
    "creator_interface": (INT, [POINTER, INT]),
    "creator_name": (TEXT, [POINTER, INT]),
    "creator_version": (TEXT, [POINTER, INT]),
    "creator_namespace": (TEXT, [POINTER, INT]),
    "creator_fields": (ctypes.POINTER(FieldCollection), [POINTER, INT]),
    "creator_set_namespace": (None, [POINTER, INT, TEXT]),
    "creator_create": (POINTER, [POINTER, INT, TEXT, POINTER, INT]),
    "creator_deserialize": (POINTER, [POINTER, INT, TEXT, SIZE]),
    "plugin_destroy": (None, [POINTER]),
    "plugin_identity": (TEXT, [POINTER]),
    "plugin_outputs": (INT, [POINTER]),
    "plugin_output_types": (INT, [POINTER, POINTER, INT, POINTER, INT]),
    "plugin_output_shapes": (INT, [POINTER, POINTER, INT, POINTER, POINTER, INT]),
    "plugin_supports": (INT, [POINTER, INT, POINTER, INT, INT]),
    "plugin_combinations": (INT, [POINTER, POINTER, INT, INT, POINTER, INT]),
    "plugin_configure": (INT, [POINTER, POINTER, INT, INT]),
    "plugin_workspace": (SIZE, [POINTER, POINTER, INT, INT]),
    "plugin_aliased_input": (INT, [POINTER, INT]),
    "plugin_timing_cache_id": (TEXT, [POINTER]),
    "plugin_shape_change": (INT, [POINTER, POINTER, INT, INT]),
    "plugin_enqueue": (INT, [POINTER, POINTER, INT, POINTER, POINTER, POINTER, POINTER]),
    "plugin_serialized": (SIZE, [POINTER, POINTER, SIZE]),
    "plugin_recreated": (POINTER, [POINTER]),
    "plugin_cloned": (POINTER, [POINTER]),
    "plugin_attached": (POINTER, [POINTER]),
}


class Host:
    """A plugin library, opened through the entry point of one interface (3 or 2)."""

    def __init__(self, path: Path, interface: int) -> None:
        self.interface = interface
        # First and for all: libraries of TensorRT 8 find the log through it.
        self._c = ctypes.CDLL(str(build.harness()), ctypes.RTLD_GLOBAL)
        self.library = emulated.Library(path)
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments
        self._host = self.call("host_open", str(path).encode(), ENTRIES[interface].encode())
        count = self.call("creator_count", self._host)
        self.creators = {
            self.call("creator_name", self._host, i).decode(): Creator(self, i)
            for i in range(count)
        }
        assert len(self.creators) == count, "creators share a name"

    def call(self, name: str, *arguments: Any) -> Any:
        """The answer of a function of harness.cpp; raises Crash if the plugin crashed."""
        answer = getattr(self._c, name)(*arguments)
        crash = self._c.host_crash()
        if crash:
            raise Crash("%s: %s" % (name, crash.decode()))
        return answer

    def ask_creator(self, name: str, creator: int, *arguments: Any) -> Any:
        return self.call(name, self._host, creator, *arguments)

    def messages(self) -> list[tuple[int, str]]:
        """(severity, text) of what was logged since the last call."""
        severity = INT()
        lines = []
        for i in range(self._c.host_messages()):
            text = self._c.host_message(i, ctypes.byref(severity))
            lines.append((severity.value, text))
        self._c.host_forget_messages()
        return [(severity, text.decode("ascii")) for severity, text in lines]

    @property
    def heap_calls(self) -> ctypes.c_uint64:
        """Calls of the plugins' own code to the heap."""
        return ctypes.c_uint64.in_dll(self.library.c, "conformance_heap_calls")

    @property
    def heap_fails_in(self) -> ctypes.c_int64:
        """Calls until one of them finds no memory; -1: all do."""
        return ctypes.c_int64.in_dll(self.library.c, "conformance_heap_fails_in")


class Creator:
    """One of a library's creators, by its number."""

    def __init__(self, host: Host, number: int) -> None:
        self.host, self.number = host, number
        ask = host.ask_creator
        self.interface: int = ask("creator_interface", number)
        self.name: str = ask("creator_name", number).decode()
        self.version: str = ask("creator_version", number).decode()

    @property
    def namespace(self) -> str:
        return str(self.host.ask_creator("creator_namespace", self.number).decode())

    @namespace.setter
    def namespace(self, name: str) -> None:
        self.host.ask_creator("creator_set_namespace", self.number, name.encode())

    @property
    def fields(self) -> list[tuple[str, int]]:
        """Names and types of the attributes that it announces."""
        collection = self.host.ask_creator("creator_fields", self.number).contents
        listed = [collection.fields[i] for i in range(collection.count)]
        return [(f.name.decode(), f.type) for f in listed]

    def create(self, fields: Sequence[Field] | None, phase: int = 0) -> Plugin | None:
        """A plugin with these attributes, or None; its memory is the plugin's alone.

        fields: None for a null pointer. phase: 0 build, 1 run (of V3).
        """
        collection = _collection(fields or ())
        pointer = None if fields is None else ctypes.byref(collection[0])
        plugin = self._wrap("creator_create", b"layer", pointer, phase)
        for data in collection[1]:  # what the plugin wants to keep it must have copied
            ctypes.memset(data, 0xA5, len(data))
        return plugin

    def made(self, attributes: dict[str, Any]) -> Plugin:
        """A plugin with these attributes, which are good ones."""
        plugin = self.create(fields_of(attributes))
        assert plugin, self.host.messages()
        return plugin

    def deserialize(self, data: bytes) -> Plugin | None:
        """V2: a plugin of what one serialised."""
        exact = ctypes.create_string_buffer(data, max(len(data), 1))
        return self._wrap("creator_deserialize", exact, len(data))

    def _wrap(self, name: str, *arguments: Any) -> Plugin | None:
        address = self.host.ask_creator(name, self.number, *arguments)
        return Plugin(self, address) if address else None


def _collection(fields: Sequence[Field]) -> tuple[FieldCollection, list[Any]]:
    """Fields in ctypes, and the buffers that hold their values, exactly as long."""
    array = (PluginField * len(fields))()
    buffers = []
    for place, field in zip(array, fields):
        place.name = None if field.name is None else field.name.encode()
        place.type, place.length = field.type, field.length
        if field.data is not None:
            buffers.append(ctypes.create_string_buffer(field.data, len(field.data)))
            place.data = ctypes.addressof(buffers[-1])
    return FieldCollection(len(fields), array), buffers


class Plugin:
    """A plugin; destroyed with this object, or by destroy()."""

    def __init__(self, creator: Creator, address: int) -> None:
        self.creator, self.host = creator, creator.host
        self._address: int | None = address

    def destroy(self) -> None:
        address, self._address = self._address, None
        if address:
            self.host.call("plugin_destroy", address)

    def __del__(self) -> None:
        self.destroy()

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self.host.call(name, self._address, *arguments)

    def identity(self) -> str:
        """NAMESPACE::NAME:VERSION."""
        return str(self._ask("plugin_identity").decode())

    def outputs(self) -> int:
        return int(self._ask("plugin_outputs"))

    def output_types(self, types: Sequence[int], outputs: int) -> list[int] | None:
        """DataTypes of the outputs; None for an error."""
        out = (INT * outputs)(*[-1] * outputs)
        status = self._ask("plugin_output_types", out, outputs, (INT * len(types))(*types),
                           len(types))  # fmt: skip
        return None if status else list(out)

    def output_shapes(
        self, inputs: Sequence[Dims], varying: Sequence[Sequence[int]], outputs: int
    ) -> list[tuple[int, ...] | None] | None:
        """Shapes of the outputs (None for one that has none); None for an error.

        varying: for each input, the axes whose size is known at run time only.
        """
        out = (Dims * outputs)()
        masks = (ctypes.c_uint32 * len(inputs))(*(sum(1 << a for a in axes) for axes in varying))
        given = (Dims * len(inputs))(*inputs)
        status = self._ask("plugin_output_shapes", out, outputs, given, masks, len(inputs))
        if status:
            return None
        return [tuple(d.sizes[: d.rank]) if d.rank >= 0 else None for d in out]

    def supports(self, position: int, all_: Sequence[DynamicDesc], inputs: int) -> bool:
        array = (DynamicDesc * len(all_))(*all_)
        answer = self._ask("plugin_supports", position, array, inputs, len(all_) - inputs)
        return bool(answer)

    def combinations(
        self, all_: Sequence[DynamicDesc], inputs: int
    ) -> list[list[tuple[int, int]]] | None:
        """(type, format) of every tensor, for every combination that is taken; None if an answer
        depends on what comes after its position."""
        most, count = 64, len(all_)
        pairs = (INT * (2 * count * most))()
        array = (DynamicDesc * count)(*all_)
        found = self._ask("plugin_combinations", array, inputs, count - inputs, pairs, most)
        assert found <= most
        if found < 0:
            return None
        flat = iter(list(pairs)[: 2 * count * found])
        both = list(zip(flat, flat))
        return [both[i * count : (i + 1) * count] for i in range(found)]

    def configure(self, all_: Sequence[DynamicDesc], inputs: int) -> int:
        array = (DynamicDesc * len(all_))(*all_)
        return int(self._ask("plugin_configure", array, inputs, len(all_) - inputs))

    def workspace(self, all_: Sequence[DynamicDesc], inputs: int) -> int:
        array = (DynamicDesc * len(all_))(*all_)
        return int(self._ask("plugin_workspace", array, inputs, len(all_) - inputs))

    def aliased_input(self, output: int) -> int:
        return int(self._ask("plugin_aliased_input", output))

    def timing_cache_id(self) -> str | None:
        text = self._ask("plugin_timing_cache_id")
        return None if text is None else str(text.decode())

    def shape_change(self, all_: Sequence[TensorDesc], inputs: int) -> int:
        array = (TensorDesc * len(all_))(*all_)
        return int(self._ask("plugin_shape_change", array, inputs, len(all_) - inputs))

    def enqueue(
        self,
        all_: Sequence[TensorDesc],
        inputs: Sequence[int | None] | None,
        outputs: Sequence[int | None] | None,
        workspace: int | None,
        stream: int | None,
        count: int | None = None,
    ) -> int:
        """The plugin's status; addresses of device memory, None for null.

        count: of inputs among all_, where `inputs` does not say it.
        """
        array = (TensorDesc * len(all_))(*all_)
        given = None if inputs is None else (POINTER * len(inputs))(*inputs)
        made = None if outputs is None else (POINTER * len(outputs))(*outputs)
        if count is None:
            count = len(inputs) if inputs is not None else len(all_) - len(outputs or ())
        return int(self._ask("plugin_enqueue", array, count, given, made, workspace, stream))

    def serialized(self) -> bytes:
        buffer = ctypes.create_string_buffer(1 << 16)
        size = self._ask("plugin_serialized", buffer, len(buffer))
        assert size <= len(buffer)
        return buffer.raw[:size]

    def recreated(self) -> Plugin:
        """Another one, of what this one serialises."""
        return self._made("recreated")

    def cloned(self) -> Plugin:
        return self._made("cloned")

    def attached(self) -> Plugin:
        """Another one, attached to an execution context."""
        return self._made("attached")

    def another(self, how: str) -> Plugin | None:
        """The same by the name of the method; None if there is none."""
        address = self._ask("plugin_" + how)
        return Plugin(self.creator, address) if address else None

    def _made(self, how: str) -> Plugin:
        plugin = self.another(how)
        assert plugin, (how, self.host.messages())
        return plugin
