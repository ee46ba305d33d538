"""SharedKVRead's CUDA kernel, executed by the CPU emulation, against the PyTorch definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins import emulated
from tests.plugins.shared_kv import (
    FIELDS,
    INPUTS,
    SCHEDULES,
    STATE,
    Case,
    any_bits,
    assert_same,
    attributes,
    cases,
    define,
    execute,
    inputs,
    state_of,
)

ARCHITECTURES = (72, 80)


@pytest.fixture(scope="module")
def library() -> emulated.Library:
    return emulated.load("shared_kv")


@given(case=cases(), sm=st.sampled_from(ARCHITECTURES), schedule=st.sampled_from(SCHEDULES))
def test_equals_definition(library: emulated.Library, case: Case, sm: int, schedule: str) -> None:
    """A reader over its donor's pages, with queries of its own; it changes nothing."""
    data = inputs(case)
    data.update({name: state for name, state in define(case, data).items() if name in STATE})
    data["q"] = data["q"][..., ::-1].copy()
    names = [name for name, _ in FIELDS if name in INPUTS]
    tensors = [torch.from_numpy(data[name].copy()) for name in names]
    out = torch.ops.edgepool.shared_kv_read(*tensors, *attributes(case)).numpy()
    got = execute(library, case, data, sm, write=False, schedule=schedule)
    assert_same(case, got, {**data, "out": out})


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("length", [1, 12])
def test_reads_what_the_donor_wrote(library: emulated.Library, sm: int, length: int) -> None:
    """After SharedKVAttention, the same queries get the same bits."""
    case = Case(length=length, group=3, columns=8, seed=length)
    data = inputs(case)
    donor = execute(library, case, data, sm)
    reader = {**data, **{name: donor[name] for name in STATE}}
    got = execute(library, case, reader, sm, write=False)
    np.testing.assert_array_equal(got["out"], donor["out"])


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_same_bits_in_any_order(library: emulated.Library, sm: int) -> None:
    case = Case(length=1, group=16, k=170, columns=200, block_tokens=16, window=300, sinks=16)
    data = inputs(case)
    data.update({name: state for name, state in define(case, data).items() if name in STATE})
    once = execute(library, case, data, sm, write=False)["out"]
    for schedule in emulated.TWENTY:
        again = execute(library, case, data, sm, write=False, schedule=schedule)["out"]
        np.testing.assert_array_equal(once, again)


@pytest.mark.parametrize("seeds", emulated.SEEDS)
def test_any_bits(library: emulated.Library, seeds: range) -> None:
    """Arbitrary bits in every input: no fault, an end, and nothing is written."""
    for seed in seeds:
        case, data = any_bits(seed)
        got = execute(library, case, data, ARCHITECTURES[seed // 2 % 2], write=False)
        for name in state_of(case):
            assert got[name].tobytes() == data[name].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asan", "checked"])
def test_under_watch(kind: str) -> None:
    """The fast tests with every access watched."""
    emulated.run_tests(__file__, kind)


@pytest.mark.slow
def test_thousand_cases_under_address_sanitizer() -> None:
    emulated.run_tests(__file__, "asan", "test_any_bits", marked="")
