"""Attributes that are missing, of another type or out of range: one line says what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.conformance.execution import assert_refused
from tests.plugins.conformance.host import CHAR, FLOAT32, INT32, Creator, Field, Host, fields_of
from tests.plugins.conformance.operations import OPERATIONS, Operation

NAN, INFINITY = float("nan"), float("inf")
OUT_OF_RANGE: dict[str, dict[str, list[Any]]] = {
    "IndexPool": {
        "ratio": [0, -1, -(2**31)],
        "fuse": [2, -1],
        "weight_sparsity": [-0.1, 1.5, NAN, INFINITY],
    },
    "IndexPoolSelect": {
        "k": [-1],
        "block": [0, -1],
        "ratio": [0, -(2**31)],
        "window": [-1],
        "sinks": [-1],
    },
    "SharedKVAttention": {
        "window": [-1],
        "sinks": [-1],
        "block_tokens": [0, -1],
        "scale": [NAN, INFINITY],
        "select": [2, -1],
    },
}
OUT_OF_RANGE["SharedKVRead"] = OUT_OF_RANGE["SharedKVAttention"]


def malformed(good: Field) -> Iterator[tuple[str, Field]]:
    """The attribute as no node would have it."""
    assert good.data is not None
    yield "null data", replace(good, data=None)
    yield "no value", replace(good, length=0)
    yield "negative length", replace(good, length=-1)
    if good.type == CHAR:
        yield "integer", Field(good.name, INT32, bytes(4), 1)
        for text in ("Mean", "no", good.data[:3].decode(), "x" * 5000, "%s%n", "é\n"):
            yield "choice " + text[:8], Field.of(good.name or "", text)
        yield "zero bytes", Field(good.name, CHAR, bytes(4), 4)
    else:
        yield "two values", replace(good, data=good.data * 2, length=2)
        other = FLOAT32 if good.type == INT32 else INT32
        yield "other type", replace(good, type=other)
        yield "string", Field.of(good.name or "", "mean")
        yield "64 bits", Field(good.name, 10, bytes(8), 1)


def bad_fields() -> Iterator[tuple[str, str, str, list[Field]]]:
    for operation in OPERATIONS.values():
        good = fields_of(operation.attributes(operation.example))
        for i, (name, field) in enumerate(zip(operation.attributes(operation.example), good)):
            for what, bad in malformed(field):
                yield operation.name, name, what, [*good[:i], bad, *good[i + 1 :]]
            yield operation.name, name, "missing", [*good[:i], *good[i + 1 :]]
        for name, values in OUT_OF_RANGE[operation.name].items():
            for value in values:
                changed = {**operation.attributes(operation.example), name: value}
                yield operation.name, name, str(value), fields_of(changed)


@pytest.mark.parametrize("bad", list(bad_fields()), ids=lambda b: "-".join(map(str, b[:3])))
def test_bad_attribute(host: Host, bad: tuple[str, str, str, list[Field]]) -> None:
    operation, attribute, _, fields = bad
    host.messages()
    assert host.creators[operation].create(fields) is None
    assert_refused(host, operation, attribute, "expected")


def test_no_attributes_at_all(creator: Creator, operation: Operation) -> None:
    nothing: list[list[Field] | None] = [None, []]
    for fields in nothing:
        assert creator.create(fields) is None
        assert_refused(creator.host, operation.name)


def test_choices_are_listed(creator: Creator, operation: Operation) -> None:
    for attribute in operation.operator.attributes:
        if attribute.kind is not str:
            continue
        attributes = {**operation.attributes(operation.example), attribute.name: "other"}
        assert creator.create(fields_of(attributes)) is None
        assert_refused(creator.host, operation.name, attribute.name, "other", *attribute.choices)


def test_order_and_company_do_not_matter(creator: Creator, operation: Operation) -> None:
    fields = fields_of(operation.attributes(operation.example))
    first = creator.create(fields)
    strangers = [Field.of("plugin_version", "1"), Field(None, INT32, bytes(4), 1)]
    other = creator.create([*strangers, *reversed(fields)])
    assert first and other and first.serialized() == other.serialized()
    assert creator.host.messages() == []


def test_strings_with_and_without_a_terminator(creator: Creator, operation: Operation) -> None:
    fields = fields_of(operation.attributes(operation.example))
    ended = [
        replace(f, data=(f.data or b"")[: f.length] + b"\0", length=f.length + 1)
        if f.type == CHAR
        else f
        for f in fields
    ]
    first, other = creator.create(fields), creator.create(ended)
    assert first and other and first.serialized() == other.serialized()


@pytest.mark.parametrize("name", OPERATIONS)
@given(data=st.data())
def test_any_fields(host: Host, name: str, data: st.DataObject) -> None:
    """Random fields: a plugin, or one line; never a crash."""
    creator = host.creators[name]
    names = [a for a, _ in creator.fields]
    field = st.builds(
        lambda name, type_, value, length: Field(name, type_, value, min(length, len(value) // 8)),
        st.sampled_from([*names, "", "other"]),
        st.sampled_from([INT32, FLOAT32, CHAR, CHAR, 0, 2, 7, 10, 99]),
        st.one_of(st.binary(min_size=8, max_size=64), st.just(np.ones(4, np.int32).tobytes())),
        st.integers(-1, 8),
    )
    fields = data.draw(st.lists(field, max_size=8))
    host.messages()
    plugin = creator.create(fields)
    assert len(host.messages()) == (plugin is None)
