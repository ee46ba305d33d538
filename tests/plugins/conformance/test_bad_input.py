"""Tensors that do not fit: an error and one line that says which and what was expected."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.conformance.execution import Call, assert_refused, device, resized, stream
from tests.plugins.conformance.host import (
    Creator,
    Host,
    TensorDesc,
    describe,
    dims,
    dynamic,
    fields_of,
    tensor,
)
from tests.plugins.conformance.operations import OPERATIONS, Operation

CHW32 = 5  # a TensorFormat
MOST_BYTES = 1 << 20  # of a tensor that the fuzzing test allocates


def changed(desc: TensorDesc, shape: list[int]) -> TensorDesc:
    return tensor(shape, desc.type, desc.format)


def shape_of(desc: TensorDesc) -> list[int]:
    return list(desc.dims.sizes[: max(desc.dims.rank, 0)])


def assert_all_refuse(call: Call, where: int, *named: str) -> None:
    """Configuration, a change of shapes and execution refuse the call's tensors, with one line
    each. V2 has no answer to give at the first two."""
    plugin, inputs = call.plugin, len(call.data)
    profile = [dynamic(d) for d in call.descriptions]
    configured = plugin.configure(profile, inputs)
    assert_refused(call.host, *named)
    if plugin.creator.interface == 3:
        assert configured != 0
        assert plugin.shape_change(call.descriptions, inputs) != 0
        assert_refused(call.host, *named)
    assert call.enqueue(where) != 0
    assert_refused(call.host, *named)


def each_wrong_tensor(call: Call, operation: Operation) -> list[tuple[str, int, TensorDesc]]:
    """(name, number, description): one tensor of the call, made wrong in one way."""
    wrong = []
    arguments = [*operation.operator.inputs, *operation.operator.outputs]
    holders = Counter(size for a in arguments for size in set(a.shape))
    holders.update(a.name for a in operation.operator.attributes)
    for i, (argument, desc) in enumerate(zip(arguments, call.descriptions)):
        shape = shape_of(desc)
        for other in ([*shape, 1], shape[1:], [], [1] * 8):
            if len(other) != len(shape):
                wrong.append((argument.name, i, changed(desc, other)))
        for axis, size in enumerate(argument.shape if len(shape) == len(argument.shape) else ()):
            if isinstance(size, int) or holders[size] > 1:  # else nothing says what it has to be
                other = [n + (a == axis) for a, n in enumerate(shape)]
                wrong.append((argument.name, i, changed(desc, other)))
        for type_ in (4, 7, 8):
            wrong.append((argument.name, i, tensor(shape, type_)))
        wrong.append((argument.name, i, tensor(shape, desc.type, CHW32)))
    return wrong


def test_wrong_tensors(creator: Creator, operation: Operation) -> None:
    """Of another rank, another fixed size, another type, another format."""
    host, case = creator.host, operation.example
    plugin = creator.made(operation.attributes(case))
    with device(host) as memory, stream(host) as where:
        call = Call(memory, plugin, operation, case, operation.tensors(case))
        good = list(call.descriptions)
        for name, i, wrong in each_wrong_tensor(call, operation):
            call.descriptions = [*good[:i], wrong, *good[i + 1 :]]
            host.library.reset()
            assert call.enqueue(where) != 0, (name, shape_of(wrong), wrong.type, wrong.format)
            assert host.library.counter("stream_operations") == 0
            # Which of two tensors that disagree is wrong, nobody knows.
            assert_refused(host, operation.name)
        call.descriptions = good
        assert call.enqueue(where) == 0


def test_null_pointers(creator: Creator, operation: Operation) -> None:
    """Of a tensor that is used, and of the workspace."""
    host, case = creator.host, operation.example
    plugin = creator.made(operation.attributes(case))
    with device(host) as memory, stream(host) as where:
        call = Call(memory, plugin, operation, case, operation.tensors(case))
        host.library.reset()
        arguments = (operation.operator.inputs, operation.operator.outputs)
        lists: tuple[list[int | None], ...] = (call.inputs, call.outputs)
        for addresses, described in zip(lists, arguments):
            for i, argument in enumerate(described):
                kept = addresses[i]
                for bad in (None, (kept or 0) + 1):  # kernels load 16 bytes at a time
                    addresses[i] = bad
                    status = call.enqueue(where)
                    addresses[i] = kept
                    if status == 0:  # a constant of one element, which nothing reads
                        assert bad and np.prod(shape_of(call.descriptions[i])) == 1
                        host.library.reset()
                    else:
                        assert_refused(host, operation.name, argument.name)
                        assert host.library.counter("stream_operations") == 0
        if call.workspace:
            workspace, call.workspace = call.workspace, None
            assert call.enqueue(where) != 0
            assert_refused(host, operation.name, "workspace")
            call.workspace = workspace
        for inputs, outputs in ((None, call.outputs), (call.inputs, None)):
            count = len(call.inputs) if outputs is None else None
            assert plugin.enqueue(
                call.descriptions, inputs, outputs, call.workspace, where, count) != 0  # fmt: skip
            assert_refused(host, operation.name)
        assert call.enqueue(where) == 0


REFUSED: list[tuple[str, dict[str, Any], dict[str, int], str]] = [
    # operator, changes of the case, changes of sizes in all tensors, what is named
    ("IndexPool", {}, {"Di": 24}, "Di"),
    ("IndexPool", {"ratio": 4}, {"ratio": 3}, "ratio"),
    ("IndexPoolSelect", {"block": 2}, {"U": 5}, "block"),
    ("IndexPoolSelect", {}, {"Hq": 65}, "Hq"),
    ("SharedKVAttention", {"block_tokens": 8}, {"T": 20}, "block_tokens"),
    ("SharedKVAttention", {"kv_heads": 2}, {"H": 34}, "heads"),
    ("SharedKVAttention", {"kv_heads": 2}, {"H": 5}, "Hkv"),
    ("SharedKVAttention", {}, {"D": 260}, "D"),
    ("SharedKVRead", {"block_tokens": 8}, {"T": 20}, "block_tokens"),
    ("SharedKVRead", {"kv_heads": 2}, {"H": 34}, "heads"),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda r: f"{r[0]}-{r[3]}")
def test_sizes_that_no_kernel_has(
    host: Host, refused: tuple[str, dict[str, Any], dict[str, int], str]
) -> None:
    """Heads, dimensions and pages that the kernels cannot take, all tensors agreeing."""
    name, changes, sizes, named = refused
    operation = OPERATIONS[name]
    case = replace(operation.example, **changes)
    host.library.imitate(87)
    plugin = host.creators[name].made(operation.attributes(case))
    with device(host) as memory, stream(host) as where:
        call = Call(memory, plugin, operation, case, operation.tensors(case))
        host.messages()
        call.descriptions = resized(operation, call.descriptions, sizes)
        assert_all_refuse(call, where, name, named)


def test_attributes_that_exclude_each_other(host: Host) -> None:
    """A weight_sparsity that zeroes whole pools: refused at the latest with the first tensors."""
    operation = OPERATIONS["IndexPool"]
    case = replace(operation.example, ratio=4, sparsity=0.25)
    data = operation.tensors(case)
    host.messages()
    plugin = host.creators["IndexPool"].create(fields_of(operation.attributes(case)))
    if plugin:
        tensors = describe([*data.values(), *operation.like(case, data).values()])
        status = plugin.configure([dynamic(d) for d in tensors], len(data))
        assert status != 0 or host.interface == 2
    assert_refused(host, "IndexPool", "weight_sparsity", "ratio")


@pytest.mark.parametrize("name", OPERATIONS)
def test_pools_that_tensorrt_cannot_hold(host: Host, name: str) -> None:
    """2^31 elements are refused, and the line says how many pages there may be."""
    operation = OPERATIONS[name]
    case = operation.example
    plugin = host.creators[name].made(operation.attributes(case))
    with device(host) as memory, stream(host) as where:
        call = Call(memory, plugin, operation, case, operation.tensors(case))
        host.messages()
        pool = "index_pool" if name.startswith("Index") else "k_pool"
        shape = call.data[pool].shape
        axis = [a.shape for a in operation.operator.inputs if a.name == pool][0].index("NP")
        page = int(np.prod(shape)) // shape[axis]
        most = (2**31 - 1) // page
        call.descriptions = resized(operation, call.descriptions, {"NP": most + 1})
        assert_all_refuse(call, where, name, pool, str(most))


def test_counts(creator: Creator, operation: Operation) -> None:
    """Too few or too many tensors."""
    host, case = creator.host, operation.example
    plugin = creator.made(operation.attributes(case))
    data = operation.tensors(case)
    descriptions = describe([*data.values(), *operation.like(case, data).values()])
    for shorter in (descriptions[1:], descriptions[:-1], descriptions[:1], descriptions * 3):
        inputs = min(len(data), len(shorter))
        plugin.configure([dynamic(d) for d in shorter], inputs)
        assert_refused(host, operation.name)
        plugin.workspace([dynamic(d) for d in shorter], inputs)
        assert_refused(host, operation.name)


SIZES = st.one_of(
    st.integers(0, 9),
    st.sampled_from([-1, -(2**31), -(2**63), 16, 64, 2**15, 2**31 - 1, 2**31, 2**62, 2**63 - 1]),
)


@st.composite
def other_tensors(draw: st.DrawFn, good: list[TensorDesc]) -> list[TensorDesc]:
    """Some of the descriptions, or some sizes in all of them, replaced."""
    descriptions = [changed(d, shape_of(d)) for d in good]
    if draw(st.booleans()):  # the same sizes change everywhere
        known = sorted({n for d in good for n in shape_of(d)})
        before, after = draw(st.sampled_from(known)), draw(SIZES)
        for i, desc in enumerate(descriptions):
            shape = [after if n == before else n for n in shape_of(desc)]
            descriptions[i] = changed(desc, shape)
        return descriptions
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(good) - 1))
        what = draw(st.sampled_from(["size", "size", "shape", "rank", "type", "format"]))
        desc = descriptions[i]
        if what == "size" and 0 < desc.dims.rank <= 8:
            desc.dims.sizes[draw(st.integers(0, desc.dims.rank - 1))] = draw(SIZES)
        elif what == "shape":
            desc.dims = dims(draw(st.lists(SIZES, max_size=8)))
        elif what == "rank":
            desc.dims.rank = draw(st.sampled_from([-1, 0, 1, 8, 9, 100, 2**31 - 1]))
        elif what == "type":
            desc.type = draw(st.integers(-1, 13))
        else:
            desc.format = draw(st.integers(-1, 14))
    return descriptions


def assert_survives(host: Host, operation: Operation, draw: Callable[[Any], Any]) -> None:
    """Whatever the tensors: success, or an error and a line at each step; never a crash."""
    case = draw(operation.cases)
    data = operation.tensors(case)
    good = describe([*data.values(), *operation.like(case, data).values()])
    plugin = host.creators[operation.name].made(operation.attributes(case))
    descriptions = draw(other_tensors(good))
    host.library.imitate(draw(st.sampled_from([72, 87])))
    host.messages()
    profile = [dynamic(d) for d in descriptions]
    status = plugin.configure(profile, len(data))
    failed = len(host.messages())
    assert failed == 1 or (failed == 0 and status == 0)
    size = plugin.workspace(profile, len(data))
    assert len(host.messages()) <= 1
    fits = plugin.shape_change(descriptions, len(data)) == 0
    assert len(host.messages()) <= 1
    widths = {0: 4, 1: 2, 2: 1, 3: 4}
    bytes_ = [
        int(np.prod([float(n) for n in shape_of(d)[:8]])) * widths.get(d.type, 8)
        for d in descriptions
    ]
    with device(host) as memory, stream(host) as where:
        addresses: list[int | None] = [None] * len(good)
        if not failed and fits and max([*bytes_, size]) <= MOST_BYTES:
            addresses = [memory.put(np.zeros(n, np.uint8)) for n in bytes_]
        workspace = memory.allocate(size) if 0 < size <= MOST_BYTES else None
        status = plugin.enqueue(
            descriptions, addresses[: len(data)], addresses[len(data) :], workspace, where
        )
        if addresses[0] is None and any(bytes_):
            assert status != 0
        lines = host.messages()
        assert len(lines) == (status != 0), lines
        assert all(operation.name in text for _, text in lines)
        assert not host.library.faults()
        memory.assert_guards()


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=25)
@given(data=st.data())
def test_any_tensors(host: Host, name: str, data: st.DataObject) -> None:
    assert_survives(host, OPERATIONS[name], data.draw)


@pytest.mark.slow
def test_any_tensors_for_minutes(v3: Host, v2: Host) -> None:
    """Five minutes of it, over operators and interfaces in turn."""
    end = time.monotonic() + 300

    @settings(max_examples=50, database=None)
    @given(data=st.data(), name=st.sampled_from(sorted(OPERATIONS)), which=st.integers(0, 1))
    def some(data: st.DataObject, name: str, which: int) -> None:
        assert_survives((v3, v2)[which], OPERATIONS[name], data.draw)

    while time.monotonic() < end:
        some()
