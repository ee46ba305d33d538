"""SharedKVAttention's CUDA kernels, executed by the emulation, against the PyTorch definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins import emulated
from tests.plugins.shared_kv import SCHEDULES, Case, assert_same, cases, define, execute, inputs

ARCHITECTURES = (72, 80)


@pytest.fixture(scope="module")
def library() -> emulated.Library:
    return emulated.load("shared_kv")


@given(case=cases(), sm=st.sampled_from(ARCHITECTURES), schedule=st.sampled_from(SCHEDULES))
def test_equals_definition(library: emulated.Library, case: Case, sm: int, schedule: str) -> None:
    data = inputs(case)
    assert_same(case, execute(library, case, data, sm, schedule=schedule), define(case, data))
