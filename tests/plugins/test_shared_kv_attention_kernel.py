"""SharedKVAttention's CUDA kernels, run by the CPU emulation, against the PyTorch definition."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins import emulated
from tests.plugins.shared_kv import (
    POINTER,
    SCHEDULES,
    STATE,
    Case,
    any_bits,
    assert_same,
    cases,
    define,
    execute,
    inputs,
    parameters,
    state_of,
)

ARCHITECTURES = (72, 80)
MODES = {
    "decode": Case(length=1, group=3, k=4, columns=9, window=20, quantised=True),
    "decode-split": Case(
        length=1, group=16, k=170, columns=200, block_tokens=16, window=300, dim=48, sinks=16
    ),
    "decode-fp32": Case(
        length=2, group=2, dim=136, columns=9, quantised=False, activation=np.float32, shared=True
    ),
    "dense-split": Case(
        length=1, group=1, kv_heads=1, dim=32, columns=40, select=0, window=0, quantised=False
    ),
    "window": Case(length=5, group=4, dim=128, columns=12, select=0, window=33, sinks=5),
    "prefill": Case(length=47, group=3, dim=64, columns=14, k=4, window=8),
    "prefill-dense": Case(length=41, group=8, dim=256, columns=6, select=0, window=0),
    "prefill-fp16": Case(length=21, group=16, dim=72, columns=8, quantised=False, shared=True),
    "prefill-fp32": Case(
        length=40, group=1, dim=40, columns=9, quantised=False, activation=np.float32
    ),
}


@pytest.fixture(scope="module")
def library() -> emulated.Library:
    return emulated.load("shared_kv")


@given(case=cases(), sm=st.sampled_from(ARCHITECTURES), schedule=st.sampled_from(SCHEDULES))
def test_equals_definition(library: emulated.Library, case: Case, sm: int, schedule: str) -> None:
    data = inputs(case)
    assert_same(case, execute(library, case, data, sm, schedule=schedule), define(case, data))


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("name", MODES)
def test_every_mode(library: emulated.Library, name: str, sm: int) -> None:
    data = inputs(MODES[name])
    got = execute(library, MODES[name], data, sm, schedule="rand:4")
    assert_same(MODES[name], got, define(MODES[name], data))


def full(case: Case, past: int) -> dict[str, np.ndarray]:
    """Inputs of sequences that are `past` tokens long, with a page for each of them and the new."""
    data = inputs(replace(case, batch=1))
    pages = data["k_pool"].shape[0] - 1
    table = 1 + np.arange(case.batch * case.columns, dtype=np.int32) % pages
    data["page_table"] = table.reshape(case.batch, case.columns)
    data["past_len"] = np.full(case.batch, past, np.int32)
    data["new_len"] = np.full(case.batch, case.length, np.int32)
    for x in ("k", "v"):
        if case.quantised:
            data[x + "_scale"] = np.full_like(data[x + "_scale"], 0.01)
        else:
            data[x + "_pool"] = np.nan_to_num(data[x + "_pool"], nan=0.5)
    for name in ("q", "k", "v", "selected"):
        data[name] = np.repeat(data[name], case.batch, 0)
    return data


@pytest.mark.parametrize("name", ["decode-split", "dense-split"])
def test_is_split(library: emulated.Library, name: str) -> None:
    """These modes have several splits, so that what merges them is tested."""
    assert library.c.splits(ctypes.byref(parameters(MODES[name], inputs(MODES[name])))) >= 2


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize(
    "schedules", [SCHEDULES[1:4], pytest.param(emulated.TWENTY, marks=pytest.mark.slow)]
)
def test_same_bits_in_any_order(
    library: emulated.Library, schedules: tuple[str, ...], sm: int
) -> None:
    for name in ("decode-split", "window", "prefill"):
        data = inputs(MODES[name])
        once = execute(library, MODES[name], data, sm, schedule="seq")
        assert_same(MODES[name], once, define(MODES[name], data))
        for schedule in schedules:
            again = execute(library, MODES[name], data, sm, schedule=schedule)
            for key, array in once.items():
                np.testing.assert_array_equal(array, again[key])


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_selecting_everything_is_dense(library: emulated.Library, sm: int) -> None:
    """All candidate blocks selected, prefill step by step or at once: the dense result."""
    case = Case(batch=1, length=24, columns=6, k=9, window=8, sinks=8, group=3, seed=3)
    data = full(case, 70)
    data["selected"][:] = np.arange(1, 10, dtype=np.int32)
    sparse = execute(library, case, data, sm)
    dense = replace(case, select=0, window=0)
    want = execute(library, dense, {**data, "selected": np.full(1, -1, np.int32)}, sm)
    assert_same(case, sparse, want)

    step, at = dict(data), 0
    for length in (1, 1, 7, 11, 4):
        rows = slice(at, at + length)
        step.update({x: data[x][:, rows] for x in ("q", "k", "v", "selected")})
        step.update(past_len=np.int32([70 + at]), new_len=np.int32([length]))
        got = execute(library, replace(case, length=length), step, sm)
        step.update({name: got[name] for name in STATE})
        assert_same(case, {**want, "out": got["out"]}, {**want, "out": want["out"][:, rows]})
        at += length
    for name in STATE:
        np.testing.assert_array_equal(step[name], want[name])


@pytest.mark.parametrize("activation", [np.float32, np.float16])
def test_special_vectors(library: emulated.Library, activation: type) -> None:
    """INT8 rows of zeros, of tiny numbers, with an infinity and with a NaN have the defined bits,
    and who sees one that is no number gets NaN."""
    case = Case(batch=1, length=12, kv_heads=2, group=1, columns=1, activation=activation, select=0)
    data = full(replace(case, columns=2), 3)
    for x in ("k", "v"):
        rows = data[x][0]
        rows[0] = 0
        rows[1] = 1e-44 if activation is np.float32 else 6e-8
        rows[2, 0, 5] = np.inf
        rows[3, 1, 6] = -np.inf
        rows[4, :, 7] = np.nan
        rows[5, 0, :2] = np.inf, np.nan
        rows[6] = -0.0
        rows[7] = np.arange(case.dim) - 63.5  # halves: to the even code
        rows[8] = np.finfo(activation).max
    case = replace(case, columns=2)
    for sm in ARCHITECTURES:
        got, want = execute(library, case, data, sm), define(case, data)
        for name in STATE:
            np.testing.assert_array_equal(got[name], want[name])
        # Head 0 has the first of them in row 2, head 1 in row 3. (A query before them may be told
        # NaN too: a weight of 0 does not hide it from the definition's product.)
        for out in (got["out"], want["out"]):
            assert np.isnan(out[0, 2:, 0]).all() and np.isnan(out[0, 3:, 1]).all()
    assert np.isnan(want["k_scale"]).any() and np.isinf(want["k_scale"]).any()


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("exponent", [-30, -15, 10])
def test_values_of_any_size(library: emulated.Library, sm: int, exponent: int) -> None:
    """Scales of INT8 values far from 1 and from each other lose nothing."""
    case = Case(batch=1, length=1, columns=8, select=0, window=0, activation=np.float16)
    data = full(case, 120)
    spread = np.random.default_rng(1).integers(-8, 1, data["v_scale"].shape)
    data["v_scale"] = (2.0 ** (exponent + spread)).astype(np.float32)
    data["v"][:] = 0
    got, want = execute(library, case, data, sm), define(case, data)
    # What a half cannot hold is no fault of the kernel.
    assert np.abs(got["out"] - want["out"]).max() <= 2e-3 * np.abs(want["out"]).max() + 6e-8


@pytest.mark.parametrize("seeds", emulated.SEEDS)
def test_any_bits(library: emulated.Library, seeds: range) -> None:
    """Arbitrary bits in every input: no fault, an end, and the null page keeps its content."""
    for seed in seeds:
        case, data = any_bits(seed)
        got = execute(library, case, data, ARCHITECTURES[seed // 2 % 2])
        for name in state_of(case):
            np.testing.assert_array_equal(got[name][0], data[name][0])


def minimum_bytes(case: Case, attended: int) -> int:
    """What a decode step must move, by the formula of kernel.cuh."""
    stored = 1 if case.quantised else np.dtype(case.activation).itemsize
    element = np.dtype(case.activation).itemsize
    scales = 8 if case.quantised else 0
    read = attended * (2 * case.dim * stored + scales)
    written = 2 * case.dim * (element + stored) + scales
    rows = 2 * case.group * case.dim * element
    return case.batch * case.kv_heads * (read + written + rows)


BUDGET = Case(
    batch=1, kv_heads=2, group=4, dim=128, page_size=64, block_tokens=16, window=64, sinks=16, k=60
)


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize(
    "case",
    [BUDGET, replace(BUDGET, quantised=False), replace(BUDGET, dim=64, group=3, batch=2)],
    ids=["int8", "fp16", "int8-64"],
)
def test_bytes_of_decode(library: emulated.Library, case: Case, sm: int) -> None:
    """At a fixed budget a decode step moves the same at any context, little more than it must."""
    moved = []
    for context in (4096, 65536, 1 << 20):
        case = replace(case, columns=4)
        data = full(case, context - 1)
        # Two pages again and again, to each sequence its own: they are written.
        table = 1 + np.arange(context // 64, dtype=np.int32) % 2
        data["page_table"] = table + 2 * np.arange(case.batch, dtype=np.int32)[:, None]
        blocks = np.linspace(1, context // 16 - 6, case.k).astype(np.int32)
        data["selected"] = np.broadcast_to(blocks, data["selected"].shape).copy()
        execute(library, case, data, sm)
        moved.append(library.bytes_moved())
    attended = case.sinks + case.k * case.block_tokens + case.window
    assert max(moved) == min(moved)
    assert 1 <= moved[0] / minimum_bytes(case, attended) <= 1.15


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("context", [4096, 65536, 1 << 20])
def test_bytes_of_dense_decode(
    library: emulated.Library, context: int, quantised: bool, sm: int
) -> None:
    """The attention over a whole context; of the larger ones some blocks stand for all."""
    case = replace(BUDGET, select=0, window=0, quantised=quantised, columns=4)
    data = full(case, context - 1)
    data["page_table"] = 1 + np.arange(context // 64, dtype=np.int32)[None] % 4
    every = max(1, context >> 14)
    library.sample(every)
    try:
        execute(library, case, data, sm, write=False)
    finally:
        library.sample(1)
    assert 1 <= library.bytes_moved() * every / minimum_bytes(case, context) <= 1.15


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_largest_pool(library: emulated.Library, sm: int) -> None:
    """Pages at the end of pools of almost 2^31 elements are found and written."""
    if emulated.KIND != "plain":
        pytest.skip("the watched builds keep a shadow of every byte")
    case = Case(batch=1, length=2, kv_heads=4, group=2, dim=128, columns=4, k=3, seed=2)
    data = inputs(case)
    want = define(case, data)
    pages = data["k_pool"].shape[0]
    huge = (2**31 - 1) // (case.kv_heads * case.page_size * case.dim)
    shift = huge - pages
    used = data["page_table"] > 0
    moved = {**data, "page_table": np.where(used, data["page_table"] + shift, 0).astype(np.int32)}
    got = execute(library, case, moved, sm, shift=shift)
    assert_same(case, got, want)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"D": 264}, "D is no multiple of 8 up to 256"),
        ({"D": 60}, "D is no multiple of 8 up to 256"),
        ({"D": 72}, "D is no multiple of 16, as int8 pages need it"),
        ({"H": 5}, "H is no multiple of Hkv"),
        ({"H": 34}, "more than 16 query heads share a key-value head"),
        ({"T": 20}, "T is no multiple of block_tokens"),
        ({"block_tokens": 0}, "T is no multiple of block_tokens"),
        ({"Hs": 3}, "selected has neither 1 nor Hkv heads"),
        ({"select": 2}, "select is neither 0 nor 1"),
        ({"window": -1}, "window or sinks is negative"),
        ({"MP": 1 << 26}, "MP * T is over 2^29"),
        ({"K": 1 << 27}, "K * block_tokens is over 2^29"),
        ({"NP": 1 << 20}, "a pool has 2^31 elements or more"),
        ({"B": 70000}, "B or Hkv is over 65,535"),
        ({"B": 60000, "S": 60000}, "B * S * H is over 2^30"),
        ({"B": -1}, "a size is negative"),
        ({"activation": 2}, "q is neither float32 nor float16"),
        ({"storage": 0}, "k_pool is neither int8 nor of the type of q"),
    ],
)
def test_refuses(library: emulated.Library, changed: dict[str, int], reason: str) -> None:
    case = Case()
    data = inputs(case)
    library.c.problem.restype = ctypes.c_char_p
    assert library.c.problem(ctypes.byref(parameters(case, data))) is None
    params = parameters(case, data, **changed)
    assert library.c.problem(ctypes.byref(params)).decode() == reason
    assert library.c.launch_read(80, ctypes.byref(params)) == 1  # cudaErrorInvalidValue
    fields = [("attention", type(params)), ("k", POINTER), ("v", POINTER)]
    both = emulated.structure(fields, {"attention": params, "k": None, "v": None})
    assert library.c.launch_attention(80, ctypes.byref(both)) == 1


def test_workspace_suffices_for_less(library: emulated.Library) -> None:
    """What is asked for at the largest sizes is enough for every smaller one."""
    library.c.workspace_bytes.restype = ctypes.c_size_t
    rng = np.random.default_rng(0)
    data = inputs(Case(columns=1))
    for _ in range(300):
        select = int(rng.integers(2))
        group = int(rng.integers(1, 17))
        case = Case(group=group, select=select, window=int(rng.choice([0, 500])))
        most = {"B": 8, "S": int(rng.choice([1, 8, 64, 300])), "MP": 5000, "K": 200}
        size = {name: int(rng.integers(1, n + 1)) for name, n in most.items()}
        dense = replace(case, select=0)
        shapes = [parameters(dense, data, select=select, **s) for s in (most, size)]
        enough, asked = (library.c.workspace_bytes(ctypes.byref(s)) for s in shapes)
        splits = library.c.splits(ctypes.byref(shapes[1]))
        rows = size["B"] * size["S"] * shapes[1].H
        needed = rows * splits * (shapes[1].D + 2) * 4 if splits > 1 else 0
        assert needed <= asked <= enough


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asan", "checked"])
def test_under_watch(kind: str) -> None:
    """All of the above with every access watched."""
    emulated.run_tests(__file__, kind)


@pytest.mark.slow
def test_thousand_cases_under_address_sanitizer() -> None:
    emulated.run_tests(__file__, "asan", "test_any_bits", marked="")
