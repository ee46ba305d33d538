"""The checks for a GPU, carried out on the CPU emulation at a smaller size, so that they work when
there is one: launches are accepted, results agree, and bytes are those that speeds are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gpu import test_kernels, test_speed
from tests.gpu.conftest import ENTRIES
from tests.gpu.device import Library
from tests.plugins import emulated, toolchain

pytestmark = pytest.mark.slow
SM = 87


@pytest.fixture(scope="module")
def libraries() -> dict[str, Library]:
    sources = [Path(emulated.__file__).with_name(name + "_entry.cpp") for name in ENTRIES]
    paths = [toolchain.emulated(source, "plain", library=True) for source in sources]
    return {name: Library(path) for name, path in zip(ENTRIES, paths)}


@pytest.mark.parametrize(
    ("check", "cases"),
    [
        (test_kernels.test_index_pool, test_kernels.pool.cases()),
        (test_kernels.test_index_pool_select, test_kernels.select.cases()),
        (test_kernels.test_shared_kv_attention, test_kernels.shared_kv.cases()),
        (test_kernels.test_shared_kv_read, test_kernels.shared_kv.cases()),
    ],
)
def test_checks_of_results(
    libraries: dict[str, Library], check: Callable[..., None], cases: st.SearchStrategy
) -> None:
    body = check.hypothesis.inner_test  # type: ignore[attr-defined]
    device = {} if check is test_kernels.test_index_pool else {"sm": SM}

    @settings(max_examples=3, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def run(case: object) -> None:
        body(libraries, case=case, **device)

    run()


def test_checks_of_speed(libraries: dict[str, Library], monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of speed divides by what its kernel moves; IndexPool's reads `ape` again and again."""
    shares = []

    def seconds(library: Library, launch: Callable[[], int]) -> float:
        library.c.emulation_reset()
        assert launch() == 0
        emulated_library.c = library.c
        return 1.0

    def report(name: str, size: float, seconds: float, bandwidth: float) -> float:
        shares.append((name, emulated_library.bytes_moved() / size))
        return 1.0

    emulated_library = emulated.Library(Path(libraries["index_pool"].c._name))
    monkeypatch.setattr(Library, "seconds", seconds)
    monkeypatch.setattr(test_speed, "report", report)
    monkeypatch.setattr(test_speed, "CONTEXT", 1 << 13)
    monkeypatch.setattr(test_speed, "attribute", lambda which: 16)
    for storage in (np.int8, np.float16):
        for scoring in ("relu", "softmax"):
            test_speed.test_index_pool_select(libraries, SM, 1.0, storage, scoring)
        test_speed.test_shared_kv_read(libraries, SM, 1.0, storage)
    test_speed.test_index_pool(libraries, 1.0)
    for name, share in shares:
        assert 0.9 < share < (1.3 if "gate" in name else 1.1), shares
