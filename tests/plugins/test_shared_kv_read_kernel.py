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
    assert_same,
    attributes,
    cases,
    define,
    execute,
    inputs,
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
