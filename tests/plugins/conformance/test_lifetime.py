"""Plugins are copied, written into engines and read again, and destroyed in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.conformance.execution import assert_refused, assert_same_bits, run
from tests.plugins.conformance.host import Creator, Host, fields_of
from tests.plugins.conformance.operations import OPERATIONS, Operation

COPIES = ("cloned", "recreated", "attached")


@pytest.mark.parametrize("copy", COPIES)
def test_copy_does_the_same_without_the_original(
    creator: Creator, operation: Operation, copy: str
) -> None:
    case = operation.example
    data = operation.tensors(case)
    plugin = creator.made(operation.attributes(case))
    written, outputs = plugin.serialized(), run(plugin, operation, case, data)
    other = getattr(plugin, copy)()
    plugin.destroy()
    # What is given back may be taken again at once.
    occupied = [creator.made(operation.attributes(case)) for _ in range(4)]
    assert other.serialized() == written
    assert_same_bits(run(other, operation, case, data), outputs)
    third = getattr(other, copy)()
    other.destroy()
    assert_same_bits(run(third, operation, case, data), outputs)
    assert len(occupied) == 4 and creator.host.messages() == []


@pytest.mark.parametrize("name", OPERATIONS)
@given(data=st.data())
def test_every_attribute_survives(host: Host, name: str, data: st.DataObject) -> None:
    """Attributes decide what is serialised, and nothing else does."""
    operation, creator = OPERATIONS[name], host.creators[name]
    one, two = (operation.attributes(data.draw(operation.cases)) for _ in range(2))
    written = creator.made(one).serialized()
    for copy in COPIES:
        assert getattr(creator.made(one), copy)().serialized() == written
    assert (creator.made(two).serialized() == written) == (one == two)


def test_namespace_survives_a_copy(v2: Host, operation: Operation) -> None:
    """V2's registry may give a creator another namespace, which its plugins have from then on."""
    creator = v2.creators[operation.name]
    before = creator.namespace
    try:
        creator.namespace = "elsewhere"
        plugin = creator.made(operation.attributes(operation.example))
        for copy in (plugin, plugin.cloned(), plugin.recreated(), plugin.cloned().cloned()):
            assert copy.identity() == f"elsewhere::{operation.name}:1"
    finally:
        creator.namespace = before


@pytest.mark.parametrize("name", OPERATIONS)
@given(data=st.data())
def test_damaged_engine(v2: Host, name: str, data: st.DataObject) -> None:
    """V2: bytes that no plugin wrote give nothing and one line, or are written back as they are."""
    operation, host = OPERATIONS[name], v2
    creator = host.creators[name]
    host.messages()
    good = creator.made(operation.attributes(data.draw(operation.cases))).serialized()
    position = data.draw(st.integers(0, len(good) - 1))
    bad = data.draw(
        st.one_of(
            st.just(good[:position]),
            st.just(good + b"\0"),
            st.binary(max_size=2 * len(good)),
            st.binary(min_size=1, max_size=4).map(
                lambda x: good[:position] + x + good[position + len(x) :]
            ),
        )
    )
    plugin = creator.deserialize(bad)
    if plugin:
        assert plugin.serialized() == bad and host.messages() == []
    else:
        assert_refused(host, name)


def test_damaged_engine_fields(v3: Host, operation: Operation) -> None:
    """V3: an engine's fields are checked as a node's are."""
    creator = v3.creators[operation.name]
    creator.host.messages()
    fields = fields_of(operation.attributes(operation.example))
    assert creator.create(fields, phase=1)
    for i, field in enumerate(fields):
        assert creator.create([*fields[:i], *fields[i + 1 :]], phase=1) is None
        assert_refused(creator.host, operation.name, str(field.name))


@pytest.mark.parametrize("action", ["create", *COPIES])
def test_no_memory(creator: Creator, operation: Operation, action: str) -> None:
    """Wherever the heap refuses, nothing is made and nothing crashes; the next attempt succeeds."""
    host = creator.host
    fields = fields_of(operation.attributes(operation.example))
    original = creator.create(fields)
    assert original
    for refused in range(64):
        host.heap_fails_in.value = refused
        try:
            made = creator.create(fields) if action == "create" else original.another(action)
        finally:
            untouched = host.heap_fails_in.value >= 0
            host.heap_fails_in.value = -1
        if untouched:
            assert made and refused > 0
            break
        assert made is None
    else:
        pytest.fail("an endless number of allocations")
    host.messages()
    assert original.cloned().serialized() == original.serialized()
