"""Cases, definition and execution, shared by the tests of SharedKVAttention and SharedKVRead."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from edgepool import ops  # noqa: F401  (registers the definitions)
from tests.plugins import emulated

INT, POINTER, FLOAT = ctypes.c_int32, ctypes.c_void_p, ctypes.c_float
FIELDS = [
    *((name, POINTER) for name in ("q", "k_pool", "v_pool", "k_scale", "v_scale")),
    *((name, POINTER) for name in ("page_table", "past_len", "new_len", "selected")),
    *((name, POINTER) for name in ("out", "workspace")),
    *((name, INT) for name in ("B", "S", "H", "D", "Hkv", "NP", "T", "MP", "Hs", "K")),
    *((name, INT) for name in ("window", "sinks", "block_tokens")),
    ("scale", FLOAT),
    *((name, INT) for name in ("select", "activation", "storage")),
    ("stream", POINTER),
]
INPUTS = (
    "q", "k", "v", "k_pool", "v_pool", "k_scale", "v_scale",
    "page_table", "past_len", "new_len", "selected",
)  # fmt: skip
STATE = ("k_pool", "v_pool", "k_scale", "v_scale")
SCHEDULES = ("seq", "rev", "rand:1", "rand:2", "rand:3")
TOLERANCE = {np.float32: 1e-5, np.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    batch: int = 2
    length: int = 1
    kv_heads: int = 2
    group: int = 2
    dim: int = 64
    page_size: int = 16
    block_tokens: int = 8
    columns: int = 6
    window: int = 8
    sinks: int = 8
    select: int = 1
    k: int = 3  # blocks
    shared: bool = False  # one selection for all heads
    activation: type = np.float16
    quantised: bool = True
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    select = draw(st.integers(0, 1))
    block = draw(st.sampled_from([1, 4, 8, 12, 16, 64]))
    page = block * draw(st.integers(1, 64 // block))
    quantised = draw(st.booleans())
    dims = [16, 48, 64, 80, 128, 160, 256] if quantised else [8, 40, 64, 72, 128, 136, 256]
    # Now and then a context that is split between blocks.
    tokens = draw(st.sampled_from([60, 60, 200, 600]))
    return Case(
        batch=draw(st.integers(1, 2)),
        length=draw(st.sampled_from([1, 1, 1, 2, 4, 9, 35])),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16])),
        dim=draw(st.sampled_from(dims)),
        page_size=page,
        block_tokens=block,
        columns=max(1, tokens // page),
        window=draw(st.sampled_from([0, 1, 7, 32, 1000])),
        sinks=block * draw(st.integers(0, 2)),
        select=select,
        k=draw(st.integers(1, max(1, tokens // block // 2))),
        shared=draw(st.booleans()),
        activation=draw(st.sampled_from([np.float32, np.float16])),
        quantised=quantised,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def inputs(case: Case) -> dict[str, np.ndarray]:
    """Ragged sequences at random places, page tables with holes and in no order, and NaN in every
    slot that nobody may read."""
    rng = np.random.default_rng(case.seed)
    size, columns = case.page_size, case.columns
    pages = 2 + case.batch * columns
    room = columns * size
    new = rng.integers(0, case.length + 1, case.batch)
    new[rng.integers(case.batch)] = case.length
    new = np.minimum(new, room)
    past = rng.integers(0, room - new + 1)
    past = np.where(rng.random(case.batch) < 0.5, room - new, past)
    table = rng.permutation(np.arange(1, pages))[: case.batch * columns]
    table = table.reshape(case.batch, columns)
    table[rng.random(table.shape) < 0.15] = 0

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(case.activation)

    # Which slots hold tokens of the past.
    filled = np.zeros((pages, size), bool)
    for b in range(case.batch):
        position = np.arange(past[b])
        filled[table[b, position // size], position % size] = True
    filled[0] = False
    filled = np.broadcast_to(filled[:, None], (pages, case.kv_heads, size))
    shape = (*filled.shape, case.dim)
    data: dict[str, np.ndarray] = {
        "q": normal(case.batch, case.length, case.kv_heads * case.group, case.dim),
        "k": normal(case.batch, case.length, case.kv_heads, case.dim),
        "v": normal(case.batch, case.length, case.kv_heads, case.dim),
    }
    for x in ("k", "v"):
        if case.quantised:
            data[x + "_pool"] = rng.integers(-127, 128, shape).astype(np.int8)
            # Scales of vectors of all sizes.
            scale = (rng.random(shape[:3]) * 2.0 ** rng.integers(-12, -4, shape[:3])).astype(
                np.float32
            )
            data[x + "_scale"] = np.where(filled, scale, np.float32(np.nan))
        else:
            data[x + "_pool"] = np.where(filled[..., None], normal(*shape), np.nan)
            data[x + "_pool"] = data[x + "_pool"].astype(case.activation)
            data[x + "_scale"] = np.zeros(1, np.float32)
    data["page_table"] = table.astype(np.int32)
    data["past_len"] = past.astype(np.int32)
    data["new_len"] = new.astype(np.int32)
    data["selected"] = selection(case, rng) if case.select else np.full(1, -1, np.int32)
    return data


def selection(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Distinct blocks, some of them none, ascending with -1 at the end (or, in some rows, not)."""
    heads = 1 if case.shared else case.kv_heads
    blocks = case.columns * (case.page_size // case.block_tokens)
    shape = (case.batch, case.length, heads, case.k)
    chosen = np.full(shape, -1, np.int32)
    for row in np.ndindex(shape[:3]):
        count = rng.integers(0, min(case.k, blocks) + 1)
        numbers = rng.permutation(blocks + 2)[:count]
        chosen[row][:count] = numbers if rng.random() < 0.2 else np.sort(numbers)
    return chosen


def random_bits(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Arbitrary words, some of them small."""
    bits = rng.integers(-(2**31), 2**31, like.shape)
    small = rng.integers(-3, 12, like.shape)
    return np.where(rng.random(like.shape) < 0.5, bits, small).astype(np.int32)


def any_bits(seed: int) -> tuple[Case, dict[str, np.ndarray]]:
    """A small case, of no sequence or query now and then, with arbitrary integers and scales."""
    rng = np.random.default_rng(seed)
    case = Case(
        batch=int(rng.integers(0, 3)),
        length=int(rng.choice([0, 1, 1, 2, 9])),
        kv_heads=int(rng.integers(1, 3)),
        group=int(rng.choice([1, 3])),
        dim=16,
        page_size=8,
        block_tokens=int(rng.choice([2, 8])),
        columns=int(rng.integers(0, 4)),
        window=int(rng.choice([0, 3, 2**31 - 1])),
        sinks=int(rng.choice([0, 8, 2**31 - 1])),
        select=int(rng.integers(2)),
        k=int(rng.integers(1, 4)),
        shared=bool(rng.integers(2)),
        activation=(np.float32, np.float16)[seed % 2],
        quantised=bool(rng.integers(2)),
        seed=seed,
    )
    data = inputs(replace(case, batch=max(case.batch, 1), columns=max(case.columns, 1)))
    if case.columns == 0:
        data["page_table"] = data["page_table"][:, :0]
    for name in ("page_table", "past_len", "new_len", "selected"):
        data[name] = random_bits(rng, data[name])
    if case.quantised:
        for name in ("k_scale", "v_scale"):
            data[name] = random_bits(rng, data[name]).view(np.float32)
    return case, data


def state_of(case: Case) -> tuple[str, ...]:
    return STATE if case.quantised else STATE[:2]


def attributes(case: Case) -> tuple[int, int, int, float, int]:
    return case.window, case.sinks, case.block_tokens, case.dim**-0.5, case.select


def define(case: Case, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the PyTorch definition gives: `out` and the state."""
    tensors = [torch.from_numpy(data[name].copy()) for name in INPUTS]
    out = torch.ops.edgepool.shared_kv_attention(*tensors, *attributes(case))
    return dict(zip(("out", *STATE), (t.numpy() for t in out)))


def parameters(case: Case, data: dict[str, np.ndarray], **values: Any) -> ctypes.Structure:
    """The kernel's ReadParams; pointers are null unless given."""
    window, sinks, block_tokens, scale, select = attributes(case)
    given = dict(
        {name: None for name, kind in FIELDS if kind is POINTER},
        B=case.batch,
        S=case.length,
        H=case.kv_heads * case.group,
        D=case.dim,
        Hkv=case.kv_heads,
        NP=data["k_pool"].shape[0],
        T=case.page_size,
        MP=data["page_table"].shape[1],
        Hs=data["selected"].shape[2] if case.select else 1,
        K=data["selected"].shape[3] if case.select else 1,
        window=window,
        sinks=sinks,
        block_tokens=block_tokens,
        scale=scale,
        select=select,
        activation=emulated.TYPES[np.dtype(case.activation)],
        storage=emulated.TYPES[data["k_pool"].dtype],
    )
    return emulated.structure(FIELDS, {**given, **values})


def execute(
    library: emulated.Library,
    case: Case,
    data: dict[str, np.ndarray],
    sm: int,
    write: bool = True,
    schedule: str = "seq",
    shift: int = 0,
) -> dict[str, np.ndarray]:
    """`out` and the state as the kernel of SharedKVAttention (or SharedKVRead) leaves them.

    With `shift`, pools have that many pages more, at their beginning.
    """
    library.imitate(sm, schedule)
    library.reset()
    library.c.workspace_bytes.restype = ctypes.c_size_t
    with library.memory() as memory:
        address = {}
        read: dict[str, Any] = {"NP": data["k_pool"].shape[0] + shift}
        for name in INPUTS:
            before = data[name][0].nbytes * shift if name in STATE else 0
            start = memory.allocate(before + data[name].nbytes)
            memory.write(start + before, data[name])
            address[name] = start + before
            if name not in ("k", "v"):
                read[name] = start
        address["out"] = memory.allocate(data["q"].nbytes)
        size = library.c.workspace_bytes(ctypes.byref(parameters(case, data)))
        workspace = memory.allocate(size)
        params = parameters(case, data, **read, out=address["out"], workspace=workspace)
        if write:
            fields = [("attention", type(params)), ("k", POINTER), ("v", POINTER)]
            new = {"attention": params, "k": address["k"], "v": address["v"]}
            params = emulated.structure(fields, new)
        launch = library.c.launch_attention if write else library.c.launch_read
        status = launch(sm, ctypes.byref(params))
        assert (status, library.faults()) == (0, [])
        like = {**data, "out": data["q"]}
        return {name: memory.get(address[name], like[name]) for name in ("out", *STATE)}


def assert_same(case: Case, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """State equal to the bit; `out` to within the tolerance of each row's largest element."""
    for name in STATE:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    out, expected = got["out"].astype(np.float64), want["out"].astype(np.float64)
    largest = np.abs(expected).max(-1, keepdims=True)
    assert not np.isnan(expected).any()
    worst = np.abs(out - expected).max() / TOLERANCE[case.activation]
    assert (np.abs(out - expected) <= TOLERANCE[case.activation] * largest).all(), worst
