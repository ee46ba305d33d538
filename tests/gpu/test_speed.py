"""Decode kernels at 1M tokens of context, against the bandwidth that a copy on this GPU reaches.

Bytes are those of the formulas in plugins/<op>/kernel.cuh. Every case reads more than any cache
holds, and is printed with what it reached.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.gpu.device import MULTIPROCESSORS, Library, attribute
from tests.plugins import emulated, shared_kv
from tests.plugins import test_index_pool_kernel as pool
from tests.plugins import test_index_pool_select_kernel as select

pytestmark = pytest.mark.slow  # scripts/gpu_check.sh runs them
CONTEXT, PAGE, RATIO, HEADS, DIM = 1 << 20, 64, 4, 8, 128
LEAST = 0.7  # of the copy's bandwidth
F16, INT8 = emulated.TYPES[np.dtype(np.float16)], emulated.TYPES[np.dtype(np.int8)]


@pytest.fixture(scope="module")
def bandwidth(libraries: dict[str, Library]) -> float:
    """Bytes a second of a copy."""
    return libraries["index_pool"].copy_bandwidth()


def filled(library: Library, memory: emulated.Memory, size: int) -> int:
    """Address of so many bytes of 1: a small number in any of the types."""
    address = memory.allocate(size)
    assert library.c.cudaMemset(address, 1, size) == 0
    return address


def report(name: str, size: float, seconds: float, bandwidth: float) -> float:
    share = size / seconds / bandwidth
    print(
        "\n%-46s %7.1f MB %9.1f us %7.0f GB/s %4.0f %% of a copy's %.0f GB/s"
        % (name, size / 1e6, seconds * 1e6, size / seconds / 1e9, 100 * share, bandwidth / 1e9)
    )
    return share


@pytest.mark.parametrize("scoring", ["relu", "softmax"])
@pytest.mark.parametrize("storage", [np.int8, np.float16])
def test_index_pool_select(
    libraries: dict[str, Library], sm: int, bandwidth: float, storage: type, scoring: str
) -> None:
    library = libraries["index_pool_select"]
    pools, columns, queries = CONTEXT // RATIO, CONTEXT // PAGE, 4
    vector = DIM * np.dtype(storage).itemsize
    with library.memory() as memory:
        values = {
            name: None for name, kind in select.FIELDS if kind is ctypes.c_void_p
        } | dict(
            q=filled(library, memory, HEADS * queries * DIM * 2),
            w=filled(library, memory, HEADS * queries * 2),
            index_pool=filled(library, memory, HEADS * (pools + PAGE // RATIO) * vector),
            index_scale=filled(library, memory, HEADS * (pools + PAGE // RATIO) * 4),
            page_table=memory.put(np.arange(1, columns + 1, dtype=np.int32)),
            past_len=memory.put(np.array([CONTEXT - 1], np.int32)),
            new_len=memory.put(np.array([1], np.int32)),
            selected=memory.allocate(HEADS * 128 * 4),
            B=1, S=1, Hs=HEADS, Hq=queries, Di=DIM, NP=columns + 1, U=PAGE // RATIO, MP=columns,
            scoring=select.SCORINGS.index(scoring), k=128, block=4, ratio=RATIO, window=512,
            sinks=64,
            activation=F16, storage=emulated.TYPES[np.dtype(storage)], sm=sm,
            multiprocessors=attribute(MULTIPROCESSORS), workspace_size=0,
        )  # fmt: skip
        params = emulated.structure(select.FIELDS, values)
        size = library.c.workspace_bytes(ctypes.byref(params))
        params.workspace, params.workspace_size = memory.allocate(size), size
        seconds = library.seconds(lambda: library.c.launch(ctypes.byref(params)))
    read = HEADS * pools * (vector + (4 if storage is np.int8 else 0))
    # Scores of blocks, or every index query's affinity, written and read.
    scores = 8 * HEADS * pools * (queries if scoring == "softmax" else 1 / 4)
    name = "index_pool_select %s %s" % (scoring, storage.__name__)
    assert report(name, read + scores, seconds, bandwidth) >= LEAST


@pytest.mark.parametrize("storage", [np.int8, np.float16])
def test_shared_kv_read(
    libraries: dict[str, Library], sm: int, bandwidth: float, storage: type
) -> None:
    """64 sequences that attend 2,048 selected tokens and a window of 512 each."""
    library = libraries["shared_kv"]
    batch, group, blocks, window, columns = 64, 4, 32, 512, CONTEXT // PAGE
    vector, rng = DIM * np.dtype(storage).itemsize, np.random.default_rng(1)
    tables = [np.roll(np.arange(1, columns + 1), 200 * b) for b in range(batch)]
    far = columns - window // PAGE - 1
    chosen = [np.sort(rng.choice(far, blocks, replace=False)) for _ in range(batch)]
    with library.memory() as memory:
        pools = [filled(library, memory, (columns + 1) * HEADS * PAGE * vector) for _ in range(2)]
        scales = [filled(library, memory, (columns + 1) * HEADS * PAGE * 4) for _ in range(2)]
        row = batch * HEADS * group * DIM * 2
        values = dict(
            q=filled(library, memory, row), out=memory.allocate(row), workspace=None,
            k_pool=pools[0], v_pool=pools[1], k_scale=scales[0], v_scale=scales[1],
            page_table=memory.put(np.stack(tables).astype(np.int32)),
            past_len=memory.put(np.full(batch, CONTEXT - 1, np.int32)),
            new_len=memory.put(np.ones(batch, np.int32)),
            selected=memory.put(np.stack(chosen).astype(np.int32)),
            B=batch, S=1, H=HEADS * group, D=DIM, Hkv=HEADS, NP=columns + 1, T=PAGE, MP=columns,
            Hs=1, K=blocks, window=window, sinks=0, block_tokens=PAGE, scale=DIM**-0.5, select=1,
            activation=F16, storage=emulated.TYPES[np.dtype(storage)], stream=None,
        )  # fmt: skip
        params = emulated.structure(shared_kv.FIELDS, values)
        size = library.c.workspace_bytes(ctypes.byref(params))
        params.workspace = memory.allocate(max(size, 1))
        seconds = library.seconds(lambda: library.c.launch_read(sm, ctypes.byref(params)))
    tokens = batch * (blocks * PAGE + window)
    size = tokens * HEADS * (2 * vector + (8 if storage is np.int8 else 0)) + 2 * row
    assert report("shared_kv_read %s" % storage.__name__, size, seconds, bandwidth) >= LEAST


def test_index_pool(libraries: dict[str, Library], bandwidth: float) -> None:
    """4,096 sequences whose pools close: what one moves is too little to time."""
    library = libraries["index_pool"]
    batch, kept = 4096, RATIO - 1
    row = HEADS * DIM * 2
    with library.memory() as memory:
        tail = filled(library, memory, batch * RATIO * 2 * row)
        values = dict(
            keys=filled(library, memory, batch * row), gates=filled(library, memory, batch * row),
            ape=filled(library, memory, RATIO * row), fusion=None, tail=tail, tail_out=tail,
            page_table=memory.put(np.arange(1, batch + 1, dtype=np.int32)),
            past_len=memory.put(np.full(batch, kept, np.int32)),
            new_len=memory.put(np.ones(batch, np.int32)),
            index_pool=memory.allocate(HEADS * (batch + 1) * (PAGE // RATIO) * DIM),
            index_scale=memory.allocate(HEADS * (batch + 1) * (PAGE // RATIO) * 4),
            B=batch, S=1, Hs=HEADS, Di=DIM, NP=batch + 1, U=PAGE // RATIO, MP=1, ratio=RATIO,
            weighting=pool.WEIGHTINGS.index("gate"), post_norm=0, fuse=0, weight_sparsity=0.0,
            activation=F16, storage=INT8, stream=None,
        )  # fmt: skip
        params = emulated.structure(pool.FIELDS, values)
        seconds = library.seconds(lambda: library.c.launch(ctypes.byref(params)))
    # Keys and gates of the pool read, its tail written as zeros, the pool written.
    size = batch * (2 * RATIO * row + 2 * RATIO * row + HEADS * (DIM + 4))
    assert report("index_pool gate int8", size, seconds, bandwidth) >= LEAST
