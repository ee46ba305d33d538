"""Run a plugin on device memory as an engine does, and hold it to what every call must do."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.plugins import emulated
from tests.plugins.conformance.host import Host, Plugin, TensorDesc, describe, dynamic, tensor
from tests.plugins.conformance.operations import Arrays, Operation

GUARD = 0 if emulated.KIND in ("asan", "checked") else 256  # those builds watch bounds themselves


class Device:
    """Device memory of one call: every tensor exactly as large as it is, between guards."""

    def __init__(self, host: Host, memory: emulated.Memory) -> None:
        self.host, self.memory = host, memory
        self._guards: list[int] = []

    def allocate(self, size: int) -> int:
        """Address of `size` bytes of 0xFF: NaN, or -1."""
        start = self.memory.allocate(size + 2 * GUARD)
        self._guards += [start, start + GUARD + size]
        return start + GUARD

    def put(self, array: np.ndarray) -> int:
        address = self.allocate(array.nbytes)
        self.memory.write(address, array)
        return address

    def assert_guards(self) -> None:
        for address in self._guards:
            assert ctypes.string_at(address, GUARD) == b"\xff" * GUARD, "written out of bounds"


@contextmanager
def device(host: Host) -> Iterator[Device]:
    with host.library.memory() as memory:
        yield Device(host, memory)


@contextmanager
def stream(host: Host) -> Iterator[int]:
    handle = ctypes.c_void_p()
    assert host.library.c.cudaStreamCreate(ctypes.byref(handle)) == 0
    assert handle.value
    try:
        yield handle.value
    finally:
        host.library.c.cudaStreamDestroy(handle)


class Call:
    """A plugin that is ready to run on given tensors: configured, with memory and workspace.

    in_place: state is updated where it is, as with aliased or same-address tensors.
    """

    def __init__(
        self, device: Device, plugin: Plugin, operation: Operation, case: Any, data: Arrays,
        in_place: bool = True,
    ) -> None:  # fmt: skip
        self.device, self.plugin, self.host = device, plugin, plugin.host
        self.data, self.in_place, self.aliases = data, in_place, operation.aliases()
        self.like = operation.like(case, data)
        self.descriptions: list[TensorDesc] = [
            *describe(data.values()), *describe(self.like.values()),
        ]  # fmt: skip
        profile = [dynamic(d) for d in self.descriptions]
        assert plugin.configure(profile, len(data)) == 0, self.host.messages()
        size = plugin.workspace(profile, len(data))
        self.workspace = device.allocate(size) if size else None
        self.inputs: list[int | None] = [device.put(a) for a in data.values()]
        self.outputs: list[int | None] = [
            self.inputs[alias] if in_place and alias >= 0 else device.allocate(array.nbytes)
            for alias, array in zip(self.aliases, self.like.values())
        ]
        assert plugin.shape_change(self.descriptions, len(data)) == 0, self.host.messages()

    def enqueue(self, stream: int) -> int:
        return self.plugin.enqueue(
            self.descriptions, self.inputs, self.outputs, self.workspace, stream
        )

    def results(self) -> Arrays:
        """The outputs; asserts that nothing else was written."""
        written = set(self.outputs)
        for (name, array), address in zip(self.data.items(), self.inputs):
            if address not in written and address:
                now = self.device.memory.get(address, array)
                assert now.tobytes() == array.tobytes(), "input %s was changed" % name
        self.device.assert_guards()
        return {
            name: self.device.memory.get(address, array)
            for (name, array), address in zip(self.like.items(), self.outputs)
            if address
        }


def run(
    plugin: Plugin, operation: Operation, case: Any, data: Arrays, in_place: bool = True
) -> Arrays:
    """The outputs of a plugin, which must neither allocate nor wait, nor copy state in place, nor
    touch the default stream, and must log nothing."""
    host, library = plugin.host, plugin.host.library
    host.messages()
    with device(host) as memory, stream(host) as where:
        call = Call(memory, plugin, operation, case, data, in_place)
        library.reset()
        host.heap_calls.value = 0
        status = call.enqueue(where)
        counted = {
            name: library.counter(name)
            for name in ("allocations", "releases", "blocking_calls", "default_stream")
        }
        heap = host.heap_calls.value
        copies = library.counter("stream_operations") - library.counter("launches")
        assert (status, library.faults(), host.messages()) == (0, [], [])
        assert not any(counted.values()), counted
        assert heap == 0, "enqueue calls the heap"
        assert not (in_place and copies), "state is copied in place"
        return call.results()


def resized(
    operation: Operation, descriptions: Sequence[TensorDesc], sizes: dict[str, int]
) -> list[TensorDesc]:
    """The tensors, inputs and then outputs, with these sizes (by name) in all that have them."""
    result = []
    arguments = [*operation.operator.inputs, *operation.operator.outputs]
    for argument, desc in zip(arguments, descriptions):
        shape = list(desc.dims.sizes[: desc.dims.rank])
        if len(shape) == len(argument.shape):
            shape = [sizes.get(str(name), n) for name, n in zip(argument.shape, shape)]
        result.append(tensor(shape, desc.type, desc.format))
    return result


def assert_same_bits(one: Arrays, other: Arrays) -> None:
    assert list(one) == list(other)
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name


def assert_refused(host: Host, *named: str) -> None:
    """One line was logged, an error, that names all of these."""
    lines: Sequence[tuple[int, str]] = host.messages()
    assert len(lines) == 1, lines
    severity, text = lines[0]
    assert severity == 1 and "\n" not in text, lines
    for name in named:
        assert name in text, (name, text)
