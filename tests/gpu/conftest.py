"""The kernels, compiled for the GPU of this machine; without one every test here is skipped."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gpu.device import Library, compiled, compute_capability

ENTRIES = ("index_pool", "index_pool_select", "shared_kv")


@pytest.fixture(scope="session")
def sm() -> int:
    return compute_capability()


@pytest.fixture(scope="session")
def libraries(sm: int) -> dict[str, Library]:
    with ThreadPoolExecutor() as pool:
        paths = list(pool.map(lambda name: compiled(name, sm), ENTRIES))
    return {name: Library(path) for name, path in zip(ENTRIES, paths)}
