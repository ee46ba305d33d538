"""The kernels on a real GPU against the PyTorch definitions, on the cases of the CPU emulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.gpu.device import Library
from tests.plugins import shared_kv
from tests.plugins import test_index_pool_kernel as pool
from tests.plugins import test_index_pool_select_kernel as select

pytestmark = pytest.mark.slow  # scripts/gpu_check.sh runs them
random_cases = settings(
    max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@seed(1)
@random_cases
@given(case=pool.cases())
def test_index_pool(libraries: dict[str, Library], case: pool.Case) -> None:
    data = pool.inputs(case)
    results = [pool.execute(libraries["index_pool"], case, data) for _ in range(2)]  # type: ignore[arg-type]
    pool.assert_same(case, results[0], pool.define(case, data))
    assert_same_bits(*results)


@seed(1)
@random_cases
@given(case=select.cases())
def test_index_pool_select(libraries: dict[str, Library], sm: int, case: select.Case) -> None:
    data = select.inputs(case)
    library = libraries["index_pool_select"]
    results = [select.execute(library, case, data, sm) for _ in range(2)]  # type: ignore[arg-type]
    select.assert_best(results[0], select.float64_scores(case, data), case.exact)
    assert_same_bits([results[0]], [results[1]])


@seed(1)
@random_cases
@given(case=shared_kv.cases())
def test_shared_kv_attention(libraries: dict[str, Library], sm: int, case: shared_kv.Case) -> None:
    data = shared_kv.inputs(case)
    library = libraries["shared_kv"]
    results = [shared_kv.execute(library, case, data, sm) for _ in range(2)]  # type: ignore[arg-type]
    shared_kv.assert_same(case, results[0], shared_kv.define(case, data))
    assert_same_bits(list(results[0].values()), list(results[1].values()))


@seed(1)
@random_cases
@given(case=shared_kv.cases())
def test_shared_kv_read(libraries: dict[str, Library], sm: int, case: shared_kv.Case) -> None:
    """Over the pages that SharedKVAttention leaves: its output again."""
    data = shared_kv.inputs(case)
    want = shared_kv.define(case, data)
    data.update({name: want[name] for name in shared_kv.STATE})
    got = shared_kv.execute(libraries["shared_kv"], case, data, sm, write=False)  # type: ignore[arg-type]
    shared_kv.assert_same(case, got, want)


def assert_same_bits(one: object, other: object) -> None:
    """No result depends on the order in which blocks run."""
    for a, b in zip(one, other):  # type: ignore[call-overload]
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
