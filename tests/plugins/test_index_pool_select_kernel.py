"""IndexPoolSelect's CUDA kernel, executed by the CPU emulation, against the PyTorch definition.

Selections are compared from identical stored bytes: exactly where arithmetic is exact; elsewhere
a block may be exchanged only for one whose float64 score is as good to a relative 1e-5.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgepool.ops.index_pool_select import SCORINGS, block_scores
from tests.plugins import emulated

INT, POINTER, SIZE = ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t
FIELDS = [
    *((name, POINTER) for name in ("q", "w", "index_pool", "index_scale")),
    *((name, POINTER) for name in ("page_table", "past_len", "new_len", "selected", "workspace")),
    ("workspace_size", SIZE),
    *((name, INT) for name in ("B", "S", "Hs", "Hq", "Di", "NP", "U", "MP", "scoring")),
    *((name, INT) for name in ("k", "block", "ratio", "window", "sinks")),
    *((name, INT) for name in ("activation", "storage", "sm", "multiprocessors")),
    ("stream", POINTER),
]
SCHEDULES = ("seq", "rev", "rand:1", "rand:2", "rand:3")
# Sizes at which work is split, made small, so that small cases have many splits and parts.
SMALL = (
    ("kLeastSegment = 256, kMostSegment = 2048;", "kLeastSegment = 128, kMostSegment = 128;"),
    ("kPart = 8192;", "kPart = 24;"),
)


def prepared(library: emulated.Library) -> emulated.Library:
    library.c.problem.restype = ctypes.c_char_p
    library.c.workspace_bytes.restype = SIZE
    return library


@pytest.fixture(scope="module")
def library() -> emulated.Library:
    return prepared(emulated.load("index_pool_select"))


@pytest.fixture(scope="module")
def split() -> emulated.Library:
    """The kernel with small splits."""
    return prepared(
        emulated.variant("index_pool_select", "index_pool_select", *SMALL, kind=emulated.KIND)
    )


@dataclass(frozen=True)
class Case:
    batch: int = 1
    length: int = 1
    heads: int = 1
    queries: int = 4
    dim: int = 64
    per_page: int = 4
    columns: int = 20
    ratio: int = 4
    scoring: str = "relu"
    k: int = 6
    block: int = 2
    window: int = 0
    sinks: int = 0
    activation: type = np.float16
    quantised: bool = True
    exact: bool = False  # small integers, with which every operation is exact
    in_flight: int = 0  # queries that the workspace has room for; 0: as many as it asks for
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block = draw(st.sampled_from([1, 1, 2, 3, 4, 8, 16, 32, 40]))
    per_page = block * draw(st.integers(1, 3))
    ratio = draw(st.integers(1, 4))
    exact = draw(st.booleans())
    return Case(
        batch=draw(st.integers(1, 2)),
        length=draw(st.sampled_from([1, 1, 1, 2, 3, 5, 18])),
        heads=draw(st.integers(1, 2)),
        queries=draw(st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16])),
        dim=draw(st.sampled_from([16, 64] if exact else [16, 32, 48, 64, 80, 128, 144])),
        per_page=per_page,
        columns=draw(st.integers(1, max(1, 220 // per_page))),
        ratio=ratio,
        scoring="relu" if exact else draw(st.sampled_from(SCORINGS)),
        k=draw(st.sampled_from([1, 2, 3, 7, 20, 50])),
        block=block,
        window=draw(st.sampled_from([0, 1, 5, 40])),
        sinks=block * ratio * draw(st.integers(0, 3)),
        activation=draw(st.sampled_from([np.float32, np.float16])),
        quantised=draw(st.booleans()),
        exact=exact,
        in_flight=draw(st.sampled_from([0, 0, 1, 3, 17])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def inputs(case: Case) -> dict[str, np.ndarray]:
    """Ragged sequences, most of them nearly full; page tables with holes, in no order."""
    rng = np.random.default_rng(case.seed)
    kind = case.activation
    pages = 1 + case.batch * case.columns
    room = case.columns * case.per_page * case.ratio
    new = rng.integers(0, case.length + 1, case.batch)
    new[rng.random(case.batch) < 0.6] = case.length
    new = np.minimum(new, room)
    past = np.where(
        rng.random(case.batch) < 0.7, room - new, rng.integers(0, room - new + 1, case.batch)
    )
    table = rng.permutation(np.arange(1, pages)).reshape(case.batch, case.columns)
    table[rng.random(table.shape) < 0.15] = 0

    def values(*shape: int) -> np.ndarray:
        if case.exact:
            return rng.integers(-3, 4, shape).astype(kind)
        return rng.standard_normal(shape).astype(kind)

    shape = (case.heads, pages, case.per_page, case.dim)
    codes = rng.integers(-4, 5, shape) if case.exact else rng.integers(-127, 128, shape)
    scale = 2.0 ** rng.integers(-2, 3, shape[:3]) if case.exact else rng.random(shape[:3]) / 64
    relu = case.scoring == "relu"
    return {
        "q": values(case.batch, case.length, case.heads, case.queries, case.dim),
        "w": values(case.batch, case.length, case.heads, case.queries) if relu else values(1),
        "index_pool": codes.astype(np.int8) if case.quantised else values(*shape),
        "index_scale": (scale if case.quantised else np.zeros(1)).astype(np.float32),
        "page_table": table.astype(np.int32),
        "past_len": past.astype(np.int32),
        "new_len": new.astype(np.int32),
    }


def float64_scores(case: Case, data: dict[str, np.ndarray]) -> np.ndarray:
    """Scores of all blocks, [B, S, Hs, NB], by the definition."""
    t = {name: torch.from_numpy(a) for name, a in data.items()}
    for name in ("q", "w") if case.quantised else ("q", "w", "index_pool"):
        t[name] = t[name].double()
    return block_scores(
        *t.values(), case.scoring, case.block, case.ratio, case.window, case.sinks
    ).numpy()


def parameters(case: Case, data: dict[str, np.ndarray]) -> dict[str, Any]:
    """Sizes and attributes; no pointers."""
    sizes = {name: None for name, kind in FIELDS if kind is POINTER}
    return dict(
        sizes,
        workspace_size=0,
        B=case.batch, S=case.length, Hs=case.heads, Hq=case.queries, Di=case.dim,
        NP=data["index_pool"].shape[1], U=case.per_page, MP=data["page_table"].shape[1],
        scoring=SCORINGS.index(case.scoring), k=case.k, block=case.block, ratio=case.ratio,
        window=case.window, sinks=case.sinks,
        activation=emulated.TYPES[np.dtype(case.activation)],
        storage=emulated.TYPES[data["index_pool"].dtype],
        sm=80, multiprocessors=8,
    )  # fmt: skip


def execute(
    library: emulated.Library, case: Case, data: dict[str, np.ndarray], sm: int = 80
) -> np.ndarray:
    """What the kernel selects, [B, S, Hs, k]."""
    library.reset()
    values = dict(parameters(case, data), sm=sm)

    def workspace(**changed: int) -> int:
        params = emulated.structure(FIELDS, {**values, **changed})
        return int(library.c.workspace_bytes(ctypes.byref(params)))

    size = workspace(B=1, S=min(case.in_flight, case.length)) if case.in_flight else workspace()
    like = np.empty((case.batch, case.length, case.heads, case.k), np.int32)
    with library.memory() as memory:
        values.update((name, memory.put(array)) for name, array in data.items())
        values.update(
            selected=memory.allocate(like.nbytes),
            workspace=memory.allocate(size),
            workspace_size=size,
        )
        status = library.c.launch(ctypes.byref(emulated.structure(FIELDS, values)))
        assert (status, library.faults()) == (0, [])
        return memory.get(values["selected"], like)


def assert_best(selected: np.ndarray, scores: np.ndarray, exact: bool) -> None:
    """Each row holds the best blocks by `scores` [..., NB], ascending, -1 padded."""
    for got, score in zip(
        selected.reshape(-1, selected.shape[-1]), scores.reshape(-1, scores.shape[-1])
    ):
        order = np.argsort(-np.where(np.isnan(score), np.inf, score), kind="stable")
        best = order[: min(len(got), (score != -np.inf).sum())]
        count = len(best)
        assert (got[count:] == -1).all()
        chosen = got[:count]
        assert (np.diff(chosen) > 0).all() and (count == 0 or chosen[0] >= 0)
        if set(chosen) == set(best):
            continue
        assert not exact, (sorted(best), chosen)
        taken, left = np.setdiff1d(chosen, best), np.setdiff1d(best, chosen)
        assert (score[taken] != -np.inf).all()
        largest = np.abs(score[best]).max()
        assert score[left].max() - score[taken].min() <= 1e-5 * largest


@given(case=cases(), sm=st.sampled_from([72, 80]), schedule=st.sampled_from(SCHEDULES))
def test_equals_definition(
    library: emulated.Library, split: emulated.Library, case: Case, sm: int, schedule: str
) -> None:
    data = inputs(case)
    scores = float64_scores(case, data)
    for build in (library, split):
        build.imitate(sm, schedule)
        assert_best(execute(build, case, data, sm), scores, case.exact)


MODES = [
    Case(),
    Case(activation=np.float32, quantised=False, queries=3, block=1),
    Case(scoring="softmax", length=3, queries=12, dim=80, quantised=False),
    Case(scoring="softmax", activation=np.float32, heads=2, queries=5, batch=2),
    Case(length=20, queries=3, heads=2, block=4, window=17, sinks=16, exact=True),
    Case(length=9, queries=16, scoring="softmax", block=4, window=8, in_flight=4),
]


@pytest.mark.parametrize("sm", [72, 80])
@pytest.mark.parametrize(
    "schedules", [SCHEDULES[:3], pytest.param(emulated.TWENTY, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", MODES, ids=lambda c: f"{c.scoring}-{c.length}x{c.queries}")
def test_every_mode(
    split: emulated.Library, case: Case, schedules: tuple[str, ...], sm: int
) -> None:
    """More pools than in the random cases, and the same bits in any order of blocks and threads."""
    case = replace(case, columns=80, k=40)
    data = inputs(case)
    results = []
    for schedule in schedules:
        split.imitate(sm, schedule)
        results.append(execute(split, case, data, sm))
    assert_best(results[0], float64_scores(case, data), case.exact)
    assert all((r == results[0]).all() for r in results)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("sm", [72, 80])
def test_ties_go_to_the_lower_block(
    library: emulated.Library, split: emulated.Library, scoring: str, sm: int
) -> None:
    """Three kinds of pools only, so that nearly all scores are equal."""
    case = Case(columns=60, scoring=scoring, k=50, dim=16, block=1, queries=2)
    data = inputs(case)
    rng = np.random.default_rng(3)
    kinds = rng.integers(-127, 128, (3, 16)).astype(np.int8)
    which = rng.integers(0, 3, data["index_pool"].shape[:3])
    data["index_pool"], data["index_scale"][:] = kinds[which], 1 / 64
    scores = float64_scores(case, data)
    assert len(np.unique(scores[np.isfinite(scores)])) <= 3
    for build in (library, split):
        build.imitate(sm, "rand:1")
        assert_best(execute(build, case, data, sm), scores, exact=True)


def test_scores_that_are_no_numbers(library: emulated.Library, split: emulated.Library) -> None:
    """NaN is above everything, as in PyTorch; minus infinity is never chosen; -0 equals 0."""
    case = Case(columns=30, block=1, k=70, queries=1, dim=16, exact=True)
    data = inputs(case)
    data["q"] = np.abs(data["q"]) + 1
    data["w"][:] = -1
    pool, scale = data["index_pool"], data["index_scale"]
    pool[:, :, 1] = -1  # a negative affinity: relu gives 0, times -1 is -0
    pool[:, 5:9], scale[:, 5:9] = 0, np.nan  # what quantising a NaN leaves
    pool[:, 11:20], scale[:, 11:20] = 4, 3e38  # overflows, times -1 is minus infinity
    scores = block_scores(
        *map(torch.from_numpy, data.values()), case.scoring, 1, case.ratio, 0, 0
    ).numpy()
    assert np.isnan(scores).any() and (scores == 0).any()
    assert (scores == -np.inf).sum() > (data["page_table"] == 0).sum() * 4
    for build in (library, split):
        build.imitate(80, "rev")
        assert_best(execute(build, case, data), scores, exact=True)


@pytest.mark.parametrize("sm", [72, 80])
def test_long_row(library: emulated.Library, sm: int) -> None:
    """Over kPart blocks and a k over 3,840, with the splits that a board would see."""
    case = Case(columns=2300, k=4000, block=1, dim=16, queries=1, exact=True, sinks=8, window=100)
    data = inputs(case)
    data["past_len"][:] = 2300 * 16 - 1
    library.imitate(sm)
    assert_best(execute(library, case, data, sm), float64_scores(case, data), exact=True)


def random_bits(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Arbitrary words, some of them small."""
    bits = rng.integers(-(2**31), 2**31, like.shape)
    small = rng.integers(-3, 200, like.shape)
    return np.where(rng.random(like.shape) < 0.5, bits, small).astype(np.int32)


@pytest.mark.parametrize("seeds", emulated.SEEDS)
def test_any_bits(library: emulated.Library, split: emulated.Library, seeds: range) -> None:
    """Arbitrary integers and scales: no fault, and numbers within the sequence, ascending."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        case = Case(
            batch=int(rng.integers(0, 3)),
            length=int(rng.integers(0, 4)),
            queries=int(rng.integers(1, 6)),
            dim=16,
            columns=int(rng.integers(0, 9)),
            scoring=SCORINGS[seed % 2],
            block=int(rng.choice([1, 2, 4])),
            window=int(rng.choice([0, 7, 2**31 - 1])),
            sinks=int(rng.choice([0, 16, 2**31 - 16])),
            activation=(np.float32, np.float16)[seed // 2 % 2],
            quantised=bool(rng.integers(4)),
            seed=seed,
        )
        data = inputs(replace(case, batch=max(case.batch, 1), columns=max(case.columns, 1)))
        data["page_table"] = data["page_table"][: case.batch, : case.columns]
        for name in ("page_table", "past_len", "new_len"):
            data[name] = random_bits(rng, data[name])
        if case.quantised:
            scale = random_bits(rng, data["index_scale"]).view(np.float32)
            data["index_scale"] = scale
        build = (library, split)[seed % 2]
        sm = (72, 80)[seed // 4 % 2]
        build.imitate(sm)
        selected = execute(build, case, data, sm)
        assert ((selected >= -1) & (selected < max(case.columns * 4 // case.block, 1))).all()
        later, earlier = selected[..., 1:], selected[..., :-1]
        assert ((later > earlier) | (later == -1)).all()


@pytest.mark.parametrize("context", [4096, 65536, 1 << 20])
@pytest.mark.parametrize(
    "case",
    [
        Case(dim=128, block=1, k=512),  # a learned index, 2,048 tokens
        Case(dim=128, block=1, k=512, activation=np.float32),
        Case(dim=64, block=4, k=55, queries=3, heads=3, quantised=False),  # keys of SmolLM2
        Case(dim=128, block=4, k=55, heads=2, scoring="softmax"),
    ],
    ids=["learned", "scalar", "half", "softmax"],
)
def test_bytes_of_decode(library: emulated.Library, case: Case, context: int) -> None:
    """A step reads the index once; all else is within 15 % of that, at any context."""
    case = replace(case, columns=context // 16, heads=1 if context > 65536 else case.heads)
    data = inputs(case)
    data["page_table"] = np.arange(1, case.columns + 1, dtype=np.int32)[None]
    data["past_len"][:], data["new_len"][:] = context - 1, 1
    library.imitate(80 if case.activation == np.float16 else 72)
    selected = execute(library, case, data)
    assert (selected >= 0).all()
    pools = context // case.ratio
    storage = data["index_pool"].itemsize
    vector = case.dim * storage + (4 if case.quantised else 0)
    minimum = case.heads * pools * vector + 4 * case.columns + selected.nbytes + data["q"].nbytes
    if case.scoring == "softmax":  # affinities, written and read
        minimum += case.heads * pools * case.queries * 8
    assert minimum <= library.bytes_moved() + vector * case.block <= 1.15 * minimum


def test_index_beyond_two_gigabytes(library: emulated.Library) -> None:
    """Offsets are 64 bits wide: the last pages of an index of 2^31 + 2^26 elements are read."""
    if emulated.KIND != "plain":
        pytest.skip("the watched builds keep a shadow of every byte")
    case = Case(dim=256, per_page=8, columns=4, block=1, k=3, exact=True, heads=1)
    data = inputs(case)
    per_page = case.per_page * case.dim
    pages = ((1 << 31) + (1 << 26)) // per_page
    far = np.arange(pages - 4, pages, dtype=np.int32)[None]
    data["past_len"][:], data["new_len"][:] = 4 * 32 - 1, 1
    near = dict(data, page_table=np.arange(1, 5, dtype=np.int32)[None])
    scores = float64_scores(case, near)
    library.reset()
    values = parameters(case, data)
    with library.memory() as memory:
        values.update((name, memory.put(array)) for name, array in data.items())
        index, scale = memory.allocate(pages * per_page), memory.allocate(pages * 32)
        memory.write(index + (pages - 4) * per_page, data["index_pool"][:, 1:5])
        memory.write(scale + (pages - 4) * 32, data["index_scale"][:, 1:5])
        like = np.empty((1, 1, 1, case.k), np.int32)
        values.update(
            NP=pages,
            index_pool=index,
            index_scale=scale,
            page_table=memory.put(far),
            selected=memory.allocate(like.nbytes),
            workspace=memory.allocate(1 << 16),
            workspace_size=1 << 16,
        )
        params = emulated.structure(FIELDS, values)
        assert library.c.launch(ctypes.byref(params)) == 0 and library.faults() == []
        assert_best(memory.get(values["selected"], like), scores, exact=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"Di": 24}, "Di is no multiple of 16"),
        ({"Hq": 65}, "Hq is not within 1 and 64"),
        ({"Hq": 64, "Di": 1024}, "Hq * Di is too large"),
        ({"block": 3}, "block does not divide the pools of a page"),
        ({"block": 0}, "block does not divide the pools of a page"),
        ({"ratio": 0}, "ratio is below 1"),
        ({"k": -1}, "k is negative"),
        ({"sinks": -1}, "window or sinks is negative"),
        ({"MP": 1 << 30}, "a sequence has over 2^30 pools"),
        ({"U": 1 << 17}, "a page has over 32,768 pools"),
        ({"activation": 2}, "q is neither float32 nor float16"),
        ({"storage": 0}, "index_pool is neither int8 nor of the type of q"),
        ({"S": -1}, "a size is negative or zero"),
    ],
)
def test_refuses(library: emulated.Library, changed: dict[str, int], reason: str) -> None:
    case = Case()
    values = parameters(case, inputs(case))
    assert library.c.problem(ctypes.byref(emulated.structure(FIELDS, values))) is None
    params = emulated.structure(FIELDS, {**values, **changed})
    assert library.c.problem(ctypes.byref(params)).decode() == reason
    assert library.c.launch(ctypes.byref(params)) == 1  # cudaErrorInvalidValue


def test_refuses_a_small_workspace(library: emulated.Library) -> None:
    case = Case()
    values = parameters(case, inputs(case))
    size = library.c.workspace_bytes(ctypes.byref(emulated.structure(FIELDS, values)))
    values["workspace_size"] = size - 1
    assert library.c.launch(ctypes.byref(emulated.structure(FIELDS, values))) == 1


@given(
    batch=st.integers(1, 64),
    length=st.integers(1, 4096),
    pages=st.integers(0, 1 << 16),
    scoring=st.sampled_from(SCORINGS),
    smaller=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
)
def test_workspace_for_the_largest_sizes_is_enough(
    library: emulated.Library,
    batch: int,
    length: int,
    pages: int,
    scoring: str,
    smaller: tuple[float, float, float],
) -> None:
    """TensorRT asks once, with the largest sizes; every smaller launch runs in that."""
    case = Case(batch=batch, length=length, scoring=scoring, k=0)
    data = inputs(Case())

    def values(share: tuple[float, float, float]) -> dict[str, Any]:
        b, s, m = (int(n * x) for n, x in zip((batch, length, pages), share))
        return {**parameters(case, data), "B": b, "S": s, "MP": m}

    def workspace(share: tuple[float, float, float]) -> int:
        return library.c.workspace_bytes(ctypes.byref(emulated.structure(FIELDS, values(share))))

    largest = workspace((1, 1, 1))
    one = values(smaller)
    one.update(B=min(one["B"], 1), S=min(one["S"], 1), workspace_size=largest)
    assert library.c.workspace_bytes(ctypes.byref(emulated.structure(FIELDS, one))) <= largest
    assert largest < 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asan", "checked"])
def test_under_watch(kind: str) -> None:
    """All of the above with every access watched."""
    emulated.run_tests(__file__, kind)


@pytest.mark.slow
def test_thousand_cases_under_address_sanitizer() -> None:
    emulated.run_tests(__file__, "asan", "test_any_bits", marked="")
