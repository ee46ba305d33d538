"""What plugins compute, against the PyTorch definitions, and how they use the stream."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.conformance.execution import (
    Call,
    assert_same_bits,
    device,
    run,
    stream,
)
from tests.plugins.conformance.host import Creator, Host
from tests.plugins.conformance.operations import OPERATIONS, Operation, with_types

ARCHITECTURES = (72, 80)
SCHEDULES = ("seq", "rev", "rand:1", "rand:2", "rand:3")
TYPES = [(a, q) for a in (np.float32, np.float16) for q in (False, True)]


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=max(20, settings().max_examples))
@given(
    data=st.data(),
    sm=st.sampled_from(ARCHITECTURES),
    schedule=st.sampled_from(SCHEDULES),
    in_place=st.booleans(),
)
def test_equals_definition(
    host: Host, name: str, data: st.DataObject, sm: int, schedule: str, in_place: bool
) -> None:
    operation = OPERATIONS[name]
    case = data.draw(operation.cases)
    tensors = operation.tensors(case)
    host.library.imitate(sm, schedule)
    plugin = host.creators[name].made(operation.attributes(case))
    got = run(plugin, operation, case, tensors, in_place)
    operation.check(case, tensors, got, operation.define(case, tensors))


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("types", TYPES, ids=lambda t: f"{t[0].__name__}-{'int8' * t[1]}")
def test_every_type(
    v3: Host, v2: Host, operation: Operation, types: tuple[type, bool], sm: int
) -> None:
    """In place or not and through both interfaces: the same bits, near the definition's."""
    case = with_types(operation.example, *types)
    tensors = operation.tensors(case)
    results = []
    for host in (v3, v2):
        host.library.imitate(sm)
        plugin = host.creators[operation.name].made(operation.attributes(case))
        results += [run(plugin, operation, case, tensors, in_place) for in_place in (True, False)]
    operation.check(case, tensors, results[0], operation.define(case, tensors))
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=3)
@given(data=st.data(), sm=st.sampled_from(ARCHITECTURES))
def test_both_interfaces_give_the_same_bits(
    v3: Host, v2: Host, name: str, data: st.DataObject, sm: int
) -> None:
    operation = OPERATIONS[name]
    case = data.draw(operation.cases)
    tensors = operation.tensors(case)
    results = []
    for host in (v3, v2):
        host.library.imitate(sm)
        plugin = host.creators[name].made(operation.attributes(case))
        results.append(run(plugin, operation, case, tensors))
    assert_same_bits(*results)


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_same_bits_in_any_order(creator: Creator, operation: Operation, sm: int) -> None:
    """Of blocks and threads: 20 schedules."""
    case = operation.example
    tensors = operation.tensors(case)
    plugin = creator.made(operation.attributes(case))
    results = []
    for seed in range(20):
        creator.host.library.imitate(sm, f"rand:{seed}")
        results.append(run(plugin, operation, case, tensors))
    for other in results[1:]:
        assert_same_bits(results[0], other)


def test_one_plugin_for_changing_shapes(creator: Creator, operation: Operation) -> None:
    """A plugin keeps nothing of the shapes it ran with before."""
    plugin = creator.made(operation.attributes(operation.example))
    for batch, length, columns in ((1, 1, 3), (3, 5, 7), (2, 1, 4)):
        case = replace(operation.example, batch=batch, length=length, columns=columns)
        tensors = operation.tensors(case)
        got = run(plugin, operation, case, tensors)
        operation.check(case, tensors, got, operation.define(case, tensors))


def empty(operation: Operation, case: Any, batch: int, length: int) -> dict[str, np.ndarray]:
    """The case's tensors cut to so many sequences and new tokens."""
    tensors = operation.tensors(case)
    for argument in operation.operator.inputs:
        array = tensors[argument.name]
        if argument.shape[0] == "B" and array.ndim == len(argument.shape):
            array = array[:batch]
            if "S" in argument.shape:
                array = array[:, :length]
            tensors[argument.name] = np.ascontiguousarray(array)
    if length == 0:
        tensors["new_len"][:] = 0
    if "tail" in tensors:  # nothing is waiting; other cases have what earlier pools left
        tensors["tail"][:] = 0
    return tensors


@pytest.mark.parametrize("size", [(0, 3), (2, 0), (0, 0)], ids=str)
def test_nothing_to_do(creator: Creator, operation: Operation, size: tuple[int, int]) -> None:
    """B = 0 or S = 0 is no error, and state stays as it is."""
    case = operation.example
    tensors = empty(operation, case, *size)
    plugin = creator.made(operation.attributes(case))
    for in_place in (True, False):
        got = run(plugin, operation, case, tensors, in_place)
        assert_same_bits(got, operation.define(case, tensors))


@pytest.mark.parametrize("in_place", [True, False])
def test_graph_capture(creator: Creator, operation: Operation, in_place: bool) -> None:
    """Captured, nothing happens; replayed, it computes from what is in the buffers by then."""
    case = operation.example
    first, second = (operation.tensors(replace(case, seed=seed)) for seed in (11, 12))
    plugin = creator.made(operation.attributes(case))
    cuda = creator.host.library.c
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    with device(creator.host) as memory, stream(creator.host) as where:
        call = Call(memory, plugin, operation, case, first, in_place)
        handle = ctypes.c_void_p(where)
        assert cuda.cudaStreamBeginCapture(handle, 0) == 0
        status = call.enqueue(where)
        assert cuda.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0
        assert status == 0, creator.host.messages()
        before = call.results()
        assert cuda.cudaGraphInstantiate(
            ctypes.byref(executable), graph, ctypes.c_ulonglong(0)) == 0  # fmt: skip
        for tensors in (first, second):
            call.data = tensors
            for address, array in zip(call.inputs, tensors.values()):
                assert address
                memory.memory.write(address, array)
            assert cuda.cudaGraphLaunch(executable, handle) == 0
            got = call.results()
            operation.check(case, tensors, got, operation.define(case, tensors))
            assert any(got[n].tobytes() != before[n].tobytes() for n in got)
        cuda.cudaGraphExecDestroy(executable)
        cuda.cudaGraphDestroy(graph)
    assert creator.host.messages() == []


def random_bits(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Arbitrary words, half of them small."""
    bits = rng.integers(-(2**31), 2**31, like.shape)
    small = rng.integers(-3, 12, like.shape)
    return np.where(rng.random(like.shape) < 0.5, bits, small).astype(np.int32)


def run_on_any_bits(host: Host, operation: Operation, seed: int) -> None:
    """TensorRT times plugins on buffers of arbitrary content."""
    rng = np.random.default_rng(seed)
    types = TYPES[seed % 4]
    case = replace(with_types(operation.example, *types), seed=seed, columns=3)
    tensors = empty(operation, case, int(rng.integers(0, 3)), int(rng.choice([0, 1, 1, 3])))
    for name, array in tensors.items():
        if array.dtype == np.int32:
            tensors[name] = random_bits(rng, array)
        elif name.endswith("_scale"):
            tensors[name] = random_bits(rng, array).view(np.float32)
    host.library.imitate(ARCHITECTURES[seed // 4 % 2])
    plugin = host.creators[operation.name].made(operation.attributes(case))
    run(plugin, operation, case, tensors, in_place=bool(seed % 3))


def test_any_bits(host: Host, operation: Operation) -> None:
    for seed in range(40):
        run_on_any_bits(host, operation, seed)


@pytest.mark.slow
def test_more_of_any_bits(v3: Host, operation: Operation) -> None:
    for seed in range(40, 1000):
        run_on_any_bits(v3, operation, seed)
