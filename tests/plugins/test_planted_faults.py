"""Faults planted in copies of the kernels: the cases of each operator's tests must show them.

A fault replaces a piece of a kernel's source, and is looked for in each path that has the piece:
Volta's (sm_72) and Ampere's (sm_80). SharedKVRead runs the attention of SharedKVAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tests.plugins import emulated, shared_kv, toolchain
from tests.plugins import test_index_pool_kernel as index_pool
from tests.plugins import test_index_pool_select_kernel as index_pool_select
from tests.plugins import test_shared_kv_attention_kernel as attention

PATHS = (72, 80)
# Which faults every path of which operators must have been shown to reveal.
ALL = ("IndexPool", "IndexPoolSelect", "SharedKVAttention", "SharedKVRead")
REQUIRED = {
    "missing barrier": ALL,
    "page off by one": ALL,
    "wrong tie-break": ("IndexPoolSelect",),
    "stale tail": ("IndexPool",),
    "scale of the wrong token": ALL,
    "null page": ALL,
    "unaligned load": ALL,
    "wrong head": ALL,
    "sinks": ALL[1:],
    "lost split": ALL[1:],
}


@dataclass(frozen=True)
class Fault:
    kind: str  # a key of REQUIRED, or another
    old: str
    new: str
    paths: tuple[int, ...] = PATHS
    detail: str = ""
    build: str = "plain"


def barrier(before: str, call: str, after: str, *paths: int, detail: str) -> Fault:
    """A synchronising call left out, which the watched build reports as a race."""
    old, new = before + call + after, before + after
    return Fault("missing barrier", old, new, paths or PATHS, detail, "checked")


BLOCK, WARP = "__syncthreads();", "__syncwarp();"
INDEX_POOL = [
    barrier("    ", BLOCK, "  // the first pool", detail="tail before its pool is read"),
    barrier("", BLOCK, "\n      fuse_pools<T>(p, shared, h, pools);", detail="pools"),
    barrier("fuse_pools<T>(p, shared, h, pools);\n      ", BLOCK, "", detail="fusion"),
    Fault("page off by one", "place / per_page,", "place / per_page + 1,"),
    Fault("place in a page", "+ place % per_page,", "+ (place + 1) % per_page,"),
    Fault("stale tail", "token >= total ||", "token > total ||"),
    Fault("stale tail", "closed * p.ratio + slot;", "(closed - 1) * p.ratio + slot;", detail="old"),
    Fault(
        "scale of the wrong token", "gpu::store(scales + slot,", "gpu::store(scales + (slot ^ 1),"
    ),
    Fault("null page", "if (page == 0) result.end = 0;", "", detail="written"),
    Fault("wrong head", "token - opened) * p.Hs + h)", "token - opened) * p.Hs)"),
    Fault("member off by one", "first_token + i, 0) + c", "first_token + i + (i > 0), 0) + c"),
    Fault("unaligned load", "token, part) + c)));", "token, part) + c + 1)));"),
    Fault(
        "renormalisation", "sum += logits[i] = logits[i] < least", "logits[i] = logits[i] < least"
    ),
    Fault("norm of the average", "? lane.mean_norm() : 0", "? 1 : 0"),
]
INDEX_POOL_SELECT = [
    barrier("board.factor, board.high);\n  ", BLOCK, "", detail="queries"),
    barrier(
        "  }\n  ", BLOCK, "\n  for (int i = static_cast<int>(threadIdx.x); i < tiles * 8;",
        detail="statistics",
    ),
    barrier("scratch.count[i] = 0;\n    ", BLOCK, "", detail="digits"),
    barrier("scratch.equal[warp] = equal;\n  ", BLOCK, "", detail="counts"),
    barrier("", WARP, "\n    GPU_NO_UNROLL", 72, detail="stage"),
    barrier("    }\n    ", WARP, "\n  }\n  GPU_DEVICE void affinities", 72, detail="stage again"),
    barrier("mem_row_major);\n    ", WARP, "", 72, detail="tile"),
    Fault("page off by one", "paged / p.U + i, p.MP", "paged / p.U + i + 1, p.MP"),
    Fault(
        "wrong tie-break", "tie + __popc(all_equal & below) <", "tie + __popc(all_equal & ~below) <"
    ),
    Fault("wrong tie-break", "tie = ties;", "tie = 0;", detail="of the last warps"),
    Fault("scale of the wrong token", "(lane & ~3) | i);", "(lane & ~3) | (i ^ 1));"),
    Fault("null page", "if (physical == 0) continue;", ""),
    Fault("unaligned load", "(vector[i] + channel))", "(vector[i] + channel + 1))"),
    Fault("wrong head", "(int64_t{h} * p.NP + physical)", "(int64_t{h} * 0 + physical)"),
    Fault(
        "wrong head", "at.s + row) * p.Hs + at.h) * p.Hq + query;\n      load_octet",
        "at.s + row) * p.Hs) * p.Hq + query;\n      load_octet", detail="of queries",
    ),
    Fault("sinks", "low = static_cast<int>(first <", "low = 0 * static_cast<int>(first <"),
    Fault("local span is chosen", "position + s + 1 - p.window", "position + s + 1"),
    Fault("lost split", "splits = (high + plan.segment - 1) /", "splits = (high - 1) /"),
    Fault(
        "lost split", "(row.count + kPart - 1) / kPart * plan.keep",
        "row.count / kPart * plan.keep", detail="of a row",
    ),
    Fault(
        "half a block", "for (int o = 1; o < min(together, 8)",
        "for (int o = 2; o < min(together, 8)",
    ),
    Fault("negative affinities", "return x < 0 ? 0 : x;", "return x;"),
]  # fmt: skip
ATTENTION = [
    barrier("queries);\n  ", BLOCK, "", detail="queries"),
    barrier("sums + warp * kRows);\n  ", BLOCK, "", detail="sums"),
    barrier("    ", BLOCK, "\n    if (w == way)", detail="turns"),
    barrier("+ i);\n  ", BLOCK, "", detail="splits"),
    barrier("tokens[lane] = token;\n      ", WARP, "", detail="tokens"),
    barrier("engine.step(job, tokens);\n      ", WARP, "", 80, detail="tokens overwritten"),
    barrier("= fetched_[i];\n    ", WARP, "", 72, detail="keys"),
    barrier("= weight[r];\n    ", WARP, "", 72, detail="weights"),
    Fault("page off by one", "token / in.T, in.MP", "token / in.T + 1, in.MP"),
    Fault("scale of the wrong token", "in.k_scale + found.row)", "in.k_scale + (found.row ^ 1))"),
    Fault(
        "scale of the wrong token", "in.v_scale + found.row)", "in.v_scale + (found.row ^ 1))",
        detail="of values",
    ),
    Fault("null page", "if (!page) return found;", "", detail="read"),
    Fault(
        "wrong head", "tile.kv_head * group + row % group;",
        "row % group * job.in.Hkv + tile.kv_head;", detail="of queries",
    ),
    Fault("wrong head", "(page * in.Hkv + tile.kv_head)", "(page * in.Hkv)"),
    Fault("wrong head", "in.Hs > 1 ? tile.kv_head : 0", "0", detail="of the selection"),
    Fault("sinks", "everything ? 0 : min(job.in.sinks, end)", "0"),
    Fault("sees the future", "~below(token - first_); }", "~below(token - first_ - 1); }"),
    Fault("sees less", "~below(token - first_); }", "~below(token - first_ + 1); }"),
    Fault("local span", "* block_ + window_ - 1", "* block_ + window_"),
    Fault("block taken twice", "& ~below(local_end(token) - first_)", ""),
    Fault("block skipped", "by_ = __ballot_sync(kAll, reached_ == lowest);", "by_ = 1;"),
    Fault(
        "lost split", "for (int i = thread / kLanes; i < splits;",
        "for (int i = thread / kLanes; i < splits - 1;",
    ),
    Fault(
        "lost split", "end_ = min(steps, (split + 1) * each);",
        "end_ = min(steps, (split + 1) * each - 1);", detail="a step",
    ),
    Fault("lost split", "if (w == way)", "if (w == way && w < 3)", detail="a warp"),
    Fault(
        "unaligned load", "<P>(pool, token, D_, column))", "<P>(pool, token, D_, column + 1))",
        (72,),
    ),
    Fault(
        "unaligned load", "v_pool, token, D_, column))", "v_pool, token, D_, column + 1))", (80,)
    ),
    Fault("new base", "most_ = most, sum_ *= shrink;", "most_ = most;", (72,)),
    Fault("new base", "      sum_[half] *= shrink[half];\n", "", (80,)),
    Fault("key scale", "score[r] * token.k_scale", "score[r]", (72,)),
    Fault("key scale", "scale_ * token.k_scale", "scale_", (80,)),
    Fault("value scale", "weight[r] * v_scale", "weight[r] + v_scale", (72,)),
    Fault("value scale", "shrink[0] *= by;", "", (80,)),
    Fault("wrong query", "token.queries >> query & 1", "token.queries & 1", (72,)),
    Fault("wrong query", "token.queries >> query_[i / 2] & 1", "token.queries & 1", (80,)),
]  # fmt: skip
WRITE = [
    Fault(
        "page off by one", "position / p.T, p.MP", "(position + 1) / p.T, p.MP", detail="written"
    ),
    Fault("place in a page", "+ position % p.T", "+ (position + 1) % p.T"),
    Fault("padding written", "if (s >= load_uniform(p.new_len + b)) return;", ""),
    Fault("null page", "if (page == 0) return;", "", detail="written"),
]

# Cases that mutants of the attention, compiled for D up to 64 and INT8 pages alone, are judged by.
TELLING = [
    replace(attention.MODES["decode"], kv_heads=2, seed=1),
    replace(attention.MODES["decode-split"], kv_heads=2, group=4, k=120, columns=80, seed=2),
    replace(attention.MODES["prefill"], kv_heads=2, length=19, seed=3),
    replace(attention.MODES["window"], dim=64, kv_heads=2, seed=4),
    shared_kv.Case(length=1, group=2, columns=40, select=0, window=0, seed=5),
    shared_kv.Case(length=9, group=4, columns=5, page_size=16, block_tokens=4, window=4, k=6),
]


def attention_fails(library: emulated.Library, sm: int, write: bool) -> bool:
    for case in TELLING:
        data = shared_kv.inputs(case)
        want = shared_kv.define(case, data)
        if not write:
            data.update({name: want[name] for name in shared_kv.STATE})
        try:
            got = shared_kv.execute(library, case, data, sm, write, schedule="rand:7")
            shared_kv.assert_same(case, got, want)
        except AssertionError:
            return True
    return False


def index_pool_fails(library: emulated.Library, sm: int) -> bool:
    few = [
        replace(c, length=9, per_page=3, in_place=i % 2 == 0)
        for i, c in enumerate(index_pool.MODES)
    ]
    for seed, case in enumerate(few * 3):
        library.imitate(sm, index_pool.SCHEDULES[seed % 5])
        case = replace(case, seed=seed)
        data = index_pool.inputs(case)
        try:
            got = index_pool.execute(library, case, data)
            index_pool.assert_same(case, got, index_pool.define(case, data))
        except AssertionError:
            return True
    return False


def select_fails(library: emulated.Library, sm: int) -> bool:
    index_pool_select.prepared(library)
    for seed, case in enumerate(index_pool_select.MODES):
        case = replace(case, columns=24, window=20, sinks=16, block=2, heads=2, k=20, seed=seed)
        case = replace(case, exact=seed % 2 == 0 and case.scoring == "relu")
        library.imitate(sm, index_pool_select.SCHEDULES[seed % 5])
        data = index_pool_select.inputs(case)
        try:
            got = index_pool_select.execute(library, case, data, sm)
            scores = index_pool_select.float64_scores(case, data)
            index_pool_select.assert_best(got, scores, case.exact)
        except AssertionError:
            return True
    return False


@dataclass(frozen=True)
class Operator:
    faults: list[Fault]
    entry: str
    folder: str
    fails: Callable[[emulated.Library, int], bool]
    changes: tuple[tuple[str, str], ...] = ()  # of every mutant

    def build(self, kind: str, *changes: tuple[str, str]) -> emulated.Library:
        # -O0: compiling takes longer than running.
        changed = (*self.changes, *changes)
        return emulated.variant(self.entry, self.folder, *changed, kind=kind, flags=["-O0"])


KV = ("shared_kv_narrow", "shared_kv_attention")
OPERATORS = {
    "IndexPool": Operator(INDEX_POOL, "index_pool", "index_pool", index_pool_fails),
    "IndexPoolSelect": Operator(
        INDEX_POOL_SELECT, "index_pool_select", "index_pool_select", select_fails,
        index_pool_select.SMALL,
    ),
    "SharedKVAttention": Operator(
        ATTENTION + WRITE, *KV, lambda library, sm: attention_fails(library, sm, write=True)
    ),
    "SharedKVRead": Operator(
        ATTENTION, *KV, lambda library, sm: attention_fails(library, sm, write=False)
    ),
}  # fmt: skip
PLANTED = [
    pytest.param(name, fault, sm, id=" ".join([name, str(sm), fault.kind, fault.detail]).strip())
    for name, operator in OPERATORS.items()
    for fault in operator.faults
    for sm in fault.paths
]


@pytest.mark.parametrize("kind", REQUIRED)
def test_every_path_has_its_faults(kind: str) -> None:
    for name in REQUIRED[kind]:
        planted = {sm for f in OPERATORS[name].faults if f.kind == kind for sm in f.paths}
        assert planted == set(PATHS), (name, planted)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_piece_is_in_the_source_once(name: str) -> None:
    operator = OPERATORS[name]
    text = "".join(p.read_text() for p in (toolchain.PLUGINS / operator.folder).glob("*.cuh"))
    assert [f.old for f in operator.faults if text.count(f.old) != 1] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("sm", PATHS)
@pytest.mark.parametrize("build", ["plain", "checked"])
def test_nothing_planted(name: str, sm: int, build: str) -> None:
    operator = OPERATORS[name]
    assert not operator.fails(operator.build(build), sm)


@pytest.mark.slow
def test_volta_runs_no_instruction_that_it_lacks() -> None:
    """The Ampere engine in Volta's place: it does not compile for Arch<72>, and the kernel compiled
    for Arch<80> fails on an imitated sm_72."""
    operator = OPERATORS["SharedKVRead"]
    engine = "using Type = Simt<T, P, DP>;"
    with pytest.raises(pytest.fail.Exception, match="this architecture has no mma"):
        operator.build("plain", (engine, "using Type = Tensor<A, P, DP>;"))
    library = operator.build("plain", (engine, "using Type = Tensor<gpu::Arch<80>, P, DP>;"))
    case = TELLING[0]
    data = shared_kv.inputs(case)
    shared_kv.execute(library, case, data, 80, write=False)
    with pytest.raises(AssertionError):
        shared_kv.execute(library, case, data, 72, write=False)
    assert "needs sm_80, this device is sm_72" in library.faults()[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault", "sm"), PLANTED)
def test_planted_fault_is_caught(name: str, fault: Fault, sm: int) -> None:
    operator = OPERATORS[name]
    assert operator.fails(operator.build(fault.build, (fault.old, fault.new)), sm)
