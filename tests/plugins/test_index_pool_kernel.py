"""IndexPool's CUDA kernel, executed by the CPU emulation, against the PyTorch definition."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgepool import ops  # noqa: F401  (registers the definition)
from edgepool.ops.index_pool import POST_NORMS, WEIGHTINGS
from tests.plugins import emulated

INT, POINTER, FLOAT = ctypes.c_int32, ctypes.c_void_p, ctypes.c_float
FIELDS = [
    *((name, POINTER) for name in ("keys", "gates", "ape", "fusion", "tail")),
    *((name, POINTER) for name in ("page_table", "past_len", "new_len")),
    *((name, POINTER) for name in ("tail_out", "index_pool", "index_scale")),
    *((name, INT) for name in ("B", "S", "Hs", "Di", "NP", "U", "MP", "ratio")),
    *((name, INT) for name in ("weighting", "post_norm", "fuse")),
    ("weight_sparsity", FLOAT),
    ("activation", INT),
    ("storage", INT),
    ("stream", POINTER),
]
SCHEDULES = ("seq", "rev", "rand:1", "rand:2", "rand:3")
TOLERANCE = {np.float32: 1e-5, np.float16: 2e-3}


@pytest.fixture(scope="module")
def library() -> emulated.Library:
    return emulated.load("index_pool")


@dataclass(frozen=True)
class Case:
    batch: int = 2
    length: int = 5
    heads: int = 2
    dim: int = 32
    ratio: int = 4
    per_page: int = 2
    columns: int = 4
    weighting: str = "gate"
    post_norm: str = "none"
    fuse: int = 0
    sparsity: float = 0.0
    activation: type = np.float32
    quantised: bool = False
    in_place: bool = True
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ratio = draw(st.sampled_from([1, 2, 3, 4, 8]))
    return Case(
        batch=draw(st.integers(1, 3)),
        length=draw(st.sampled_from([1, 1, 2, 4, 7, 33])),
        heads=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([16, 32, 48, 64, 80, 128, 288])),
        ratio=ratio,
        per_page=draw(st.integers(1, 4)),
        columns=draw(st.integers(1, 6)),
        weighting=draw(st.sampled_from(WEIGHTINGS)),
        post_norm=draw(st.sampled_from(POST_NORMS)),
        fuse=draw(st.integers(0, 1)),
        sparsity=draw(st.sampled_from([0.0, 0.9 / ratio])),
        activation=draw(st.sampled_from([np.float32, np.float16])),
        quantised=draw(st.booleans()),
        in_place=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def inputs(case: Case) -> dict[str, np.ndarray]:
    """Ragged sequences at random places; page tables with holes, in no order."""
    rng = np.random.default_rng(case.seed)
    kind, ratio, dim, heads = case.activation, case.ratio, case.dim, case.heads
    pages = 1 + case.batch * case.columns
    room = case.columns * case.per_page * ratio
    new = rng.integers(0, case.length + 1, case.batch)
    past = rng.integers(0, np.maximum(room - new, 0) + 1)
    table = rng.permutation(np.arange(1, pages)).reshape(case.batch, case.columns)
    table[rng.random(table.shape) < 0.2] = 0

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(kind)

    unused = np.zeros(1, kind)
    uses_gates = case.weighting != "mean"
    shape = (heads, pages, case.per_page, dim)
    pool = rng.integers(-127, 128, shape).astype(np.int8) if case.quantised else normal(*shape)
    scale = rng.random(shape[:3]).astype(np.float32) if case.quantised else np.zeros(1, np.float32)
    return {
        "keys": normal(case.batch, case.length, heads, dim),
        "gates": normal(case.batch, case.length, heads, dim) if uses_gates else unused,
        "ape": normal(ratio, heads, dim) if uses_gates else unused,
        "fusion": normal(heads, dim, dim) if case.fuse else unused,
        # Slots beyond the open pool hold what an earlier pool left; they must not matter.
        "tail": normal(case.batch, ratio, 2, heads, dim),
        "index_pool": pool,
        "index_scale": scale,
        "page_table": table.astype(np.int32),
        "past_len": past.astype(np.int32),
        "new_len": new.astype(np.int32),
    }


def define(case: Case, data: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tensors = [torch.from_numpy(a.copy()) for a in data.values()]
    out = torch.ops.edgepool.index_pool(
        *tensors, case.ratio, case.weighting, case.post_norm, case.fuse, case.sparsity
    )
    return tuple(t.numpy() for t in out)  # type: ignore[return-value]


def execute(
    library: emulated.Library, case: Case, data: dict[str, np.ndarray], **changed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tail', index_pool', index_scale' as the kernel leaves them."""
    library.reset()
    with library.memory() as memory:
        address = {name: memory.put(array) for name, array in data.items()}
        tail_out = address["tail"] if case.in_place else memory.allocate(data["tail"].nbytes)
        storage = data["index_pool"].dtype
        values = dict(
            address,
            tail_out=tail_out,
            B=case.batch,
            S=case.length,
            Hs=case.heads,
            Di=case.dim,
            NP=data["index_pool"].shape[1],
            U=case.per_page,
            MP=case.columns,
            ratio=case.ratio,
            weighting=WEIGHTINGS.index(case.weighting),
            post_norm=POST_NORMS.index(case.post_norm),
            fuse=case.fuse,
            weight_sparsity=case.sparsity,
            activation=emulated.TYPES[np.dtype(case.activation)],
            storage=emulated.TYPES[storage],
            stream=None,
        )
        params = emulated.structure(FIELDS, {**values, **changed})
        status = library.c.launch(ctypes.byref(params))
        assert (status, library.faults()) == (0, [])
        return (
            memory.get(tail_out, data["tail"]),
            memory.get(address["index_pool"], data["index_pool"]),
            memory.get(address["index_scale"], data["index_scale"]),
        )


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Equal up to `tolerance` of the vector's largest element."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    largest = np.abs(want).max(-1, keepdims=True)
    assert (np.abs(got - want) <= tolerance * largest).all()


def assert_same(
    case: Case,
    got: tuple[np.ndarray, np.ndarray, np.ndarray],
    want: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    np.testing.assert_array_equal(got[0].view(np.uint8), want[0].view(np.uint8))
    if not case.quantised:
        assert_close(got[1], want[1], TOLERANCE[case.activation])
        return
    np.testing.assert_allclose(got[2], want[2], rtol=1e-5)
    steps = np.abs(got[1].astype(int) - want[1].astype(int))
    assert steps.max(initial=0) <= 1 and steps.mean() <= max(1e-3, 1.5 / steps.size)


@given(case=cases(), sm=st.sampled_from([72, 80]), schedule=st.sampled_from(SCHEDULES))
def test_equals_definition(library: emulated.Library, case: Case, sm: int, schedule: str) -> None:
    library.imitate(sm, schedule)
    data = inputs(case)
    assert_same(case, execute(library, case, data), define(case, data))


MODES = [
    Case(weighting=w, post_norm=n, fuse=f, activation=a, quantised=q, sparsity=s)
    for w, n, f, a, q, s in [
        ("mean", "none", 0, np.float32, False, 0.0),
        ("mean", "l2", 1, np.float16, True, 0.0),
        ("gate", "none", 0, np.float16, False, 0.2),
        ("gate", "l2", 1, np.float32, True, 0.0),
        ("query", "none", 1, np.float16, True, 0.0),
        ("query", "l2", 0, np.float32, False, 0.2),
    ]
]


@pytest.mark.parametrize("sm", [72, 80])
@pytest.mark.parametrize(
    "schedules", [("rand:4",), pytest.param(emulated.TWENTY, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", MODES, ids=lambda c: f"{c.weighting}-{c.post_norm}-{c.fuse}")
def test_every_mode(
    library: emulated.Library, case: Case, schedules: tuple[str, ...], sm: int
) -> None:
    """All of a long prefill, so that every block of the grid works; the same bits in any order."""
    case = replace(case, length=97, columns=16, heads=3, dim=64, seed=1)
    data = inputs(case)
    library.imitate(sm)
    once = execute(library, case, data)
    assert_same(case, once, define(case, data))
    for schedule in schedules:
        library.imitate(sm, schedule)
        for a, b in zip(once, execute(library, case, data)):
            assert a.tobytes() == b.tobytes()


def test_step_by_step_equals_at_once(library: emulated.Library) -> None:
    """Pools and tail have the same bits however the tokens were split over steps."""
    case = Case(batch=1, length=23, columns=8, weighting="gate", post_norm="l2", quantised=True)
    data = inputs(case)
    data.update(
        page_table=np.arange(1, 9, dtype=np.int32)[None],
        past_len=np.zeros(1, np.int32),
        new_len=np.full(1, 23, np.int32),
    )
    whole = execute(library, case, data)
    step = dict(data)
    at = 0
    for length in (1, 1, 5, 1, 1, 1, 8, 2, 3):
        rows = slice(at, at + length)
        step.update(
            keys=data["keys"][:, rows],
            gates=data["gates"][:, rows],
            past_len=np.full(1, at, np.int32),
            new_len=np.full(1, length, np.int32),
        )
        out = execute(library, replace(case, length=length), step)
        step.update(zip(("tail", "index_pool", "index_scale"), out))
        at += length
    for a, b in zip(whole, (step["tail"], step["index_pool"], step["index_scale"])):
        np.testing.assert_array_equal(a, b)


def test_zero_and_infinite_vectors(library: emulated.Library) -> None:
    """INT8 rows of zeros, tiny numbers, with an infinity and with a NaN have the defined bits."""
    case = Case(batch=1, length=24, columns=3, ratio=4, weighting="mean", quantised=True)
    data = inputs(case)
    keys = data["keys"]
    keys[0, 0:4] = 0
    keys[0, 4:8] = 1e-44
    keys[0, 8, :, 3] = np.inf
    keys[0, 13, :, 5] = np.nan
    keys[0, 16:20] = 3e38
    data.update(
        page_table=np.array([[2, 1, 3]], np.int32),
        past_len=np.zeros(1, np.int32),
        new_len=np.full(1, 24, np.int32),
    )
    got, want = execute(library, case, data), define(case, data)
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[2], want[2])
    assert np.isnan(got[2]).any() and np.isinf(got[2]).any() and (got[2] == 0).any()


def test_quantises_like_the_definition(library: emulated.Library) -> None:
    """Over 50,000 elements, at most one in a thousand is off, by one step."""
    case = Case(
        batch=3, length=64, heads=4, dim=128, columns=17, weighting="gate", quantised=True, seed=5
    )
    data = inputs(case)
    data["new_len"][:] = 64
    got, want = execute(library, case, data), define(case, data)
    assert_same(case, got, want)
    assert (got[1] != data["index_pool"]).sum() > 15_000


def random_bits(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Arbitrary words, some of them small."""
    bits = rng.integers(-(2**31), 2**31, like.shape)
    small = rng.integers(-3, 12, like.shape)
    return np.where(rng.random(like.shape) < 0.5, bits, small).astype(np.int32)


@pytest.mark.parametrize("seeds", emulated.SEEDS)
def test_any_bits(library: emulated.Library, seeds: range) -> None:
    """Arbitrary integers everywhere: no fault, and the null page keeps its content."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        case = Case(
            batch=int(rng.integers(0, 3)),
            length=int(rng.integers(0, 6)),
            heads=int(rng.integers(1, 3)),
            dim=16,
            ratio=int(rng.integers(1, 5)),
            columns=int(rng.integers(0, 4)),
            weighting=WEIGHTINGS[seed % 3],
            activation=(np.float32, np.float16)[seed % 2],
            quantised=bool(rng.integers(2)),
            in_place=bool(rng.integers(2)),
            seed=seed,
        )
        data = inputs(replace(case, batch=max(case.batch, 1)))
        for name in ("page_table", "past_len", "new_len"):
            data[name] = random_bits(rng, data[name])
        _, pool, scale = execute(library, case, data)
        np.testing.assert_array_equal(pool[:, 0], data["index_pool"][:, 0])
        if case.quantised:
            np.testing.assert_array_equal(scale[:, 0], data["index_scale"][:, 0])


@pytest.mark.parametrize("context", [4096, 65536, 1 << 20])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_bytes_of_decode(library: emulated.Library, weighting: str, context: int) -> None:
    """A pool's worth of decode steps moves what the header's formula says, at any context."""
    case = Case(
        batch=2, length=1, heads=2, dim=128, per_page=4, weighting=weighting,
        activation=np.float16, quantised=True, columns=context // 16,
    )  # fmt: skip
    data = inputs(replace(case, columns=4))
    pages = data["index_pool"].shape[1]
    own = np.array([[pages - 2], [pages - 1]], np.int32)  # a page of each sequence
    data["page_table"] = own.repeat(context // 16, axis=1)
    data["new_len"] = np.ones(2, np.int32)
    row = case.heads * case.dim * 2
    parts = 1 if weighting == "mean" else 2
    expected = moved = 0
    for opened in range(4):
        data["past_len"] = np.full(2, context - 4 + opened, np.int32)
        execute(library, case, data)
        moved += library.bytes_moved()
        written = 2 * 4 * row - (2 * opened * row if opened < 3 else 0)
        read = parts * row
        if opened == 3:
            read += (parts * 3 if weighting == "gate" else 3) * row
            read += 4 * row if weighting == "gate" else 0
            written += case.heads * (case.dim + 4)
        expected += case.batch * (read + written)
    assert expected <= moved <= 1.15 * expected


def test_index_beyond_two_gigabytes(library: emulated.Library) -> None:
    """Offsets are 64 bits wide: the last pages of an index of 2^31 + 2^26 elements are written."""
    if emulated.KIND != "plain":
        pytest.skip("the watched builds keep a shadow of every byte")
    case = Case(batch=1, length=32, heads=1, dim=256, per_page=8, columns=1, quantised=True)
    data = inputs(case)
    data.update(
        page_table=np.ones((1, 1), np.int32),
        past_len=np.zeros(1, np.int32),
        new_len=np.full(1, 32, np.int32),
    )
    _, want, want_scale = execute(library, case, data)
    per_page = case.per_page * case.dim
    pages = ((1 << 31) + (1 << 26)) // per_page
    with library.memory() as memory:
        pool, scale = memory.allocate(pages * per_page), memory.allocate(pages * 32)
        far = dict(data, page_table=np.full((1, 1), pages - 1, np.int32))
        execute(library, case, far, index_pool=pool, index_scale=scale, NP=pages)
        last = pool + (pages - 1) * per_page, scale + (pages - 1) * 32
        np.testing.assert_array_equal(memory.get(last[0], want[:, 1]), want[:, 1])
        np.testing.assert_array_equal(memory.get(last[1], want_scale[:, 1]), want_scale[:, 1])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"Di": 24}, "Di is no multiple of 16"),
        ({"ratio": 0}, "ratio is below 1"),
        ({"ratio": 400}, "ratio * Di is over 6,000"),
        ({"weight_sparsity": 0.25}, "weight_sparsity is not below 1 / ratio"),
        ({"activation": 2}, "keys are neither float32 nor float16"),
        ({"storage": 1}, "index_pool is neither int8 nor of the type of keys"),
        ({"NP": 0}, "a size is negative or zero"),
    ],
)
def test_refuses(library: emulated.Library, changed: dict[str, int], reason: str) -> None:
    case = Case(activation=np.float32)
    library.c.problem.restype = ctypes.c_char_p
    values = {name: 0 for name, kind in FIELDS if kind is not POINTER}
    values.update(B=2, S=1, Hs=2, Di=case.dim, NP=2, U=2, MP=2, ratio=4)
    values.update({name: None for name, kind in FIELDS if kind is POINTER})
    assert library.c.problem(ctypes.byref(emulated.structure(FIELDS, values))) is None
    params = emulated.structure(FIELDS, {**values, **changed})
    assert library.c.problem(ctypes.byref(params)).decode() == reason
    assert library.c.launch(ctypes.byref(params)) == 1  # cudaErrorInvalidValue


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asan", "checked"])
def test_under_watch(kind: str) -> None:
    """All of the above with every access watched."""
    emulated.run_tests(__file__, kind)


@pytest.mark.slow
def test_thousand_cases_under_address_sanitizer() -> None:
    emulated.run_tests(__file__, "asan", "test_any_bits", marked="")
