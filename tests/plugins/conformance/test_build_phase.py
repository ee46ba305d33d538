"""What a builder asks: types, shapes, formats, workspace and which state is updated in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.conformance.execution import assert_refused, resized
from tests.plugins.conformance.host import (
    DATA_TYPES,
    LINEAR,
    Creator,
    Host,
    TensorDesc,
    describe,
    dims,
    dynamic,
    tensor,
)
from tests.plugins.conformance.operations import OPERATIONS, Arrays, Operation, with_types

TYPE_CHOICES = [(a, q) for a in (np.float32, np.float16) for q in (False, True)]
OTHER_TYPES = [4, 5, 6, 7, 8, 9, 10, 11]  # DataTypes that no operator takes


def types_of(arrays: Arrays) -> list[int]:
    return [DATA_TYPES[a.dtype] for a in arrays.values()]


@pytest.mark.parametrize("types", TYPE_CHOICES, ids=str)
def test_output_types(creator: Creator, operation: Operation, types: tuple[type, bool]) -> None:
    case = with_types(operation.example, *types)
    data = operation.tensors(case)
    expected = types_of(operation.like(case, data))
    plugin = creator.made(operation.attributes(case))
    assert plugin.output_types(types_of(data), len(expected)) == expected


@pytest.mark.parametrize("name", OPERATIONS)
@given(data=st.data())
def test_output_shapes(host: Host, name: str, data: st.DataObject) -> None:
    """Those of the definition, whichever sizes the network leaves open."""
    operation = OPERATIONS[name]
    case = data.draw(operation.cases)
    tensors = operation.tensors(case)
    like = operation.like(case, tensors)
    plugin = host.creators[name].made(operation.attributes(case))
    varying = operation.varying(tensors)
    every = [list(range(a.ndim)) for a in tensors.values()]
    none: list[list[int]] = [[] for _ in tensors]
    for axes in (varying, every, none):
        shapes = plugin.output_shapes([dims(a.shape) for a in tensors.values()], axes, len(like))
        assert shapes == [a.shape for a in like.values()], host.messages()


def test_output_shapes_of_wrong_ranks(creator: Creator, operation: Operation) -> None:
    plugin = creator.made(operation.attributes(operation.example))
    tensors = operation.tensors(operation.example)
    outputs = len(operation.operator.outputs)
    for i, name in enumerate(tensors):
        for rank in (0, 2, 8):
            shapes = [dims(a.shape) for a in tensors.values()]
            if shapes[i].rank == rank:
                continue
            shapes[i] = dims([1] * rank)
            if creator.interface == 3:
                assert plugin.output_shapes(shapes, [[]] * len(shapes), outputs) is None
                assert_refused(creator.host, operation.name, name, "expected")
            else:  # asked for one output after another
                made = plugin.output_shapes(shapes, [[]] * len(shapes), outputs)
                assert made == [None] * outputs
                texts = [text for _, text in creator.host.messages()]
                assert len(texts) == outputs and all(name in text for text in texts)


def accepted(operation: Operation, plugin: Any) -> list[list[tuple[int, int]]] | None:
    data = operation.tensors(operation.example)
    like = operation.like(operation.example, data)
    descriptions = [dynamic(d) for d in describe([*data.values(), *like.values()])]
    combinations: list[list[tuple[int, int]]] | None = plugin.combinations(descriptions, len(data))
    return combinations


def test_format_combinations(creator: Creator, operation: Operation) -> None:
    """Linear tensors of the four choices of types, and none of TensorRT's other ones; an answer
    depends on no tensor after the one that is asked about."""
    plugin = creator.made(operation.attributes(operation.example))
    expected = []
    for types in TYPE_CHOICES:
        case = with_types(operation.example, *types)
        data = operation.tensors(case)
        arrays = [*data.values(), *operation.like(case, data).values()]
        expected.append([(DATA_TYPES[a.dtype], LINEAR) for a in arrays])
    found = accepted(operation, plugin)
    assert found is not None, "looks at what comes after its position"
    assert sorted(found) == sorted(expected)
    assert creator.host.messages() == []


def test_format_questions_out_of_range(creator: Creator, operation: Operation) -> None:
    plugin = creator.made(operation.attributes(operation.example))
    data = operation.tensors(operation.example)
    like = operation.like(operation.example, data)
    all_ = [dynamic(d) for d in describe([*data.values(), *like.values()])]
    for position in (-1, -(2**31), len(all_), 2**31 - 1):
        assert not plugin.supports(position, all_, len(data))
    assert not plugin.supports(0, all_[:-1], len(data))
    assert not plugin.supports(0, all_[1:], len(data) - 1)


def test_wrong_types(v3: Host, operation: Operation) -> None:
    """An error that names the tensor; of V2 the answers have no room for one."""
    creator = v3.creators[operation.name]
    creator.host.messages()
    plugin = creator.made(operation.attributes(operation.example))
    data = operation.tensors(operation.example)
    like = operation.like(operation.example, data)
    for i, name in enumerate(data):
        for type_ in OTHER_TYPES:
            types = types_of(data)
            types[i] = type_
            assert plugin.output_types(types, len(like)) is None
            assert_refused(creator.host, operation.name, name, "expected")


def aliases_of(creator: Creator, operation: Operation) -> list[int]:
    plugin = creator.made(operation.attributes(operation.example))
    return [plugin.aliased_input(i) for i in range(plugin.outputs())]


def test_state_is_aliased(v3: Host, operation: Operation) -> None:
    """Where TensorRT knows it; what is no state is not."""
    assert aliases_of(v3.creators[operation.name], operation) == operation.aliases()
    plugin = v3.creators[operation.name].made(operation.attributes(operation.example))
    assert [plugin.aliased_input(i) for i in (-1, 99, 2**31 - 1, -(2**31))] == [-1] * 4


def profile(
    operation: Operation, data: Arrays, descriptions: list[TensorDesc], factor: int
) -> list[Any]:
    """The tensors with sizes that vary up to `factor` times theirs, and are -1 in the network."""
    arguments = [*operation.operator.inputs, *operation.operator.outputs]
    result = []
    for argument, desc in zip(arguments, descriptions):
        shape = list(desc.dims.sizes[: desc.dims.rank])
        open_ = [
            len(argument.shape) == len(shape) and argument.shape[i] in ("B", "S", "MP")
            for i in range(len(shape))
        ]
        most = [n * factor if o else n for n, o in zip(shape, open_)]
        given = dynamic(desc, most)
        unknown = [-1 if o else n for n, o in zip(shape, open_)]
        given.desc = tensor(unknown, desc.type)
        result.append(given)
    return result


def test_workspace_is_for_the_largest_sizes(creator: Creator, operation: Operation) -> None:
    """It comes from the profile's upper end, is enough there, and is enough for what is smaller."""
    case = operation.example
    data = operation.tensors(case)
    descriptions = describe([*data.values(), *operation.like(case, data).values()])
    plugin = creator.made(operation.attributes(case))
    sizes = []
    for factor in (1, 2, 5):
        all_ = profile(operation, data, descriptions, factor)
        assert plugin.configure(all_, len(data)) == 0, creator.host.messages()
        sizes.append(plugin.workspace(all_, len(data)))
        for desc in all_:  # neither the optimum nor the minimum matters
            desc.opt = desc.min
        assert plugin.workspace(all_, len(data)) == sizes[-1]
    assert sizes == sorted(sizes)
    assert creator.host.messages() == []


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=60)
@given(data=st.data(), sm=st.sampled_from([72, 87]))
def test_workspace_suffices_for_less(host: Host, name: str, data: st.DataObject, sm: int) -> None:
    """What the upper end of a profile asks for is enough for every size below it."""
    operation = OPERATIONS[name]
    case = data.draw(operation.cases)
    tensors = operation.tensors(case)
    good = describe([*tensors.values(), *operation.like(case, tensors).values()])
    host.library.imitate(sm)
    plugin = host.creators[name].made(operation.attributes(case))
    ranges = {"B": [1, 2, 8], "S": [1, 7, 64, 512, 2048], "MP": [1, 60, 4096, 1 << 16]}
    most = {size: data.draw(st.sampled_from(values)) for size, values in ranges.items()}
    less = {size: data.draw(st.integers(1, n)) for size, n in most.items()}
    host.messages()
    asked = []
    for sizes in (less, most):
        profile = [dynamic(d) for d in resized(operation, good, sizes)]
        asked.append(plugin.workspace(profile, len(tensors)))
    if not host.messages():  # no kernel has sizes as large
        assert asked[0] <= asked[1], (most, less)


def test_timing_cache_tells_attributes_apart(v3: Host, operation: Operation) -> None:
    """Two plugins share timings if and only if they have the same attributes."""
    creator = v3.creators[operation.name]
    attributes = operation.attributes(operation.example)
    plugin = creator.made(attributes)
    name = plugin.timing_cache_id()
    assert name
    assert {p.timing_cache_id() for p in (plugin.cloned(), plugin.recreated())} == {name}
    for attribute in operation.operator.attributes:
        value = attributes[attribute.name]
        if attribute.kind is str:
            others: list[Any] = [c for c in attribute.choices if c != value]
        elif attribute.kind is float:
            others = [float(np.nextafter(np.float32(value), np.float32(1)))]
        else:
            others = [1 - value if attribute.name in ("fuse", "select") else value * 2 + 8]
        for other in others:
            changed = creator.made({**attributes, attribute.name: other})
            assert changed.timing_cache_id() != name, attribute.name
            assert changed.serialized() != plugin.serialized(), attribute.name
