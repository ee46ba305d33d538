"""Plans: exact where they can be, monotone, linear, and honest about what does not fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepool.cli.main import main
from edgepool.config import IndexConfig, ModelConfig, weight_shapes
from edgepool.engine.footprint import memory, pages, precisions_of, state_bytes, weight_bytes
from edgepool.engine.plan import largest, plan
from edgepool.engine.roofline import (
    attention_flops,
    attention_sum,
    dense,
    linear_flops,
    modes_of,
    speed,
)
from edgepool.errors import BadInput
from edgepool.model.presets import PRESETS
from edgepool.targets import find_target, load_targets

GIB = 1 << 30
TINY, LARGE = PRESETS["edgepool-tiny"], PRESETS["edgepool-12l"]

# The shape of Qwen2.5-1.5B, whose model card says 1.54 B parameters, 1.31 B without embeddings.
QWEN = ModelConfig(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    max_context=131072,
    tie_embeddings=True,
    qkv_bias=True,
    layer_types=("sparse",) * 28,
    index=IndexConfig(),
    kv_dtype="int8",
)
ORIN, XAVIER, RTX, CPU = map(
    find_target, ("jetson-agx-orin", "jetson-agx-xavier", "rtx-4090", "cpu")
)
FLOAT, INT8 = precisions_of(ORIN)


@pytest.mark.parametrize("config", [TINY, LARGE, QWEN], ids=["tiny", "12l", "1.5B"])
@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
def test_state_bytes_are_those_of_the_models_own_state(config: ModelConfig, kv_dtype: str) -> None:
    import torch

    from edgepool.model.cache import new_state

    config = dataclasses.replace(config, kv_dtype=kv_dtype)
    parts = state_bytes(config, 2, batch=3, page_count=7)
    state = new_state(config, 3, 7, torch.float16)
    assert sum(parts.values()) == sum(x.numel() * x.element_size() for x in state)


@pytest.mark.parametrize("config", [TINY, LARGE, QWEN], ids=["tiny", "12l", "1.5B"])
def test_kv_bytes_are_linear_in_pages(config: ModelConfig) -> None:
    one, two, nine = (state_bytes(config, 2, 1, n) for n in (1, 2, 9))
    for part in ("kv", "index"):
        step = two[part] - one[part]
        assert step > 0
        assert nine[part] - one[part] == 8 * step
    assert one["tail"] == two["tail"] == nine["tail"]


def test_weight_bytes_are_those_of_the_file(tiny: Path) -> None:
    """The initialisers of an exported graph."""
    graph = onnx.load(tiny / "model.onnx").graph
    names = weight_shapes(TINY)
    stored = sum(len(x.raw_data) for x in graph.initializer if x.name in names)
    assert weight_bytes(TINY, CPU, precisions_of(CPU)[0]) == ({"fp32": stored}, 0)
    assert weight_bytes(TINY, ORIN, FLOAT) == ({"fp16": stored // 2}, 0)


def test_the_1_5b_shape() -> None:
    """Against the figures of its model card and its published file (3.09 GB in BF16)."""
    count = sum(int(np.prod(shape)) for shape in weight_shapes(QWEN).values())
    assert count == pytest.approx(1.54e9, rel=0.01)
    assert weight_bytes(QWEN, ORIN, FLOAT) == ({"fp16": 2 * count}, 0)
    assert 2 * count == pytest.approx(3.09e9, rel=0.01)
    embedding = QWEN.vocab_size * QWEN.hidden_size
    orin, _ = weight_bytes(QWEN, ORIN, INT8)  # one table, for embedding and head
    assert orin["int8"] == pytest.approx(count, rel=0.001)
    xavier, gathered = weight_bytes(QWEN, XAVIER, INT8)  # the head's in INT8, the other in FP16
    assert xavier["int8"] == orin["int8"]
    assert xavier["fp16"] - orin.get("fp16", 0) == gathered == 2 * embedding
    # The file: a quarter of the FP32 one, or, for TensorRT 8, all of it; and the scales.
    scales = 4 * sum(shape[0] for shape in weight_shapes(QWEN).values() if len(shape) == 2)
    assert count < memory(QWEN, ORIN, INT8, 1, 1).file < 0.35 * 4 * count
    assert memory(QWEN, XAVIER, INT8, 1, 1).file == 4 * count + scales

    result = plan(QWEN, XAVIER, 131072)
    kv = 28 * 2 * 2 * (128 + 4) * (131072 + 16)  # layers, K and V, heads, vector and scale
    assert result.memory["int8"].kv == kv
    assert all(fit.runs and fit.builds for fit in result.fits["int8"])
    assert result.fits["int8"][0].largest_context == 131072


@given(
    st.sampled_from([TINY, LARGE, QWEN]),
    st.sampled_from(sorted(load_targets())),
    st.integers(1, 4000),
    st.integers(0, 90),
    st.integers(1, 9),
)
def test_more_tokens_never_take_less(
    config: ModelConfig, name: str, context: int, more: int, batch: int
) -> None:
    target = find_target(name)
    for precision in precisions_of(target):
        less = memory(config, target, precision, context, batch)
        for greater in (
            memory(config, target, precision, context + more, batch),
            memory(config, target, precision, context, batch + 1),
        ):
            assert greater.total >= less.total
            assert greater.build_peak >= less.build_peak
        for mode in modes_of(target):
            slow = speed(config, target, mode, precision, context + more, batch)
            fast = speed(config, target, mode, precision, context, batch)
            assert slow.prefill_s >= fast.prefill_s
            assert slow.decode_tokens_s <= fast.decode_tokens_s


@given(st.sampled_from([TINY, LARGE, QWEN, dense(QWEN)]), st.integers(1, 3000))
def test_the_work_of_a_prompt_is_the_sum_of_its_tokens(config: ModelConfig, context: int) -> None:
    total = sum(attention_flops(config, n) for n in range(1, context + 1))
    assert attention_sum(config, context) == total


def test_linear_work_is_two_operations_per_weight() -> None:
    without = dataclasses.replace(QWEN, tie_embeddings=False)
    matrices = sum(
        int(np.prod(shape))
        for name, shape in weight_shapes(without).items()
        if len(shape) == 2 and "embed" not in name and "lm_head" not in name
    )
    down = QWEN.num_layers * QWEN.hidden_size * QWEN.intermediate_size
    assert linear_flops(without, FLOAT) == (0, 2 * matrices)
    assert linear_flops(without, INT8) == (2 * (matrices + down), 0)  # its inputs go in twice


@given(st.integers(0, 500), st.integers(1, 500))
def test_the_largest_that_fits(edge: int, most: int) -> None:
    assert largest(lambda n: n <= edge, most) == min(edge, most)


def test_the_largest_context_is_the_edge() -> None:
    """A 12-layer model on 24 GiB with many sequences: one token more does not fit."""
    target = dataclasses.replace(ORIN, memory_gib=(4,))
    fit = plan(LARGE, target, 1024, batch=16).fits["fp16"][0]
    edge = fit.largest_context
    assert 0 < edge < LARGE.max_context
    usable = 4 * GIB - 3 * GIB // 2
    assert memory(LARGE, target, FLOAT, edge, 16).total <= usable
    assert memory(LARGE, target, FLOAT, edge + LARGE.page_size, 16).total > usable
    assert not plan(LARGE, target, edge + LARGE.page_size, batch=16).fits["fp16"][0].runs


def test_a_pool_of_2_31_elements_does_not_fit_any_memory() -> None:
    target = dataclasses.replace(ORIN, memory_gib=(100_000,))
    fit = plan(QWEN, target, 131072, batch=64).fits["int8"][0]
    assert not fit.runs
    count = pages(QWEN, 64, fit.largest_context) * 2 * 16 * 128
    assert count <= 2**31 - 1 < count + 64 * 2 * 16 * 128


def test_where_pools_are_copied() -> None:
    for name, copied in (("rtx-4090", True), ("jetson-agx-orin", False), ("cpu", False)):
        result = plan(TINY, find_target(name), 1024)
        need = result.memory["int8"]
        assert need.copies == (need.state if copied else 0)
        assert result.copied_per_step["int8"] == need.copies
        assert need.kv < result.memory["fp32" if name == "cpu" else "fp16"].kv  # INT8 pages


def test_int8_and_sparse_are_never_estimated_slower() -> None:
    result = plan(QWEN, ORIN, 65536)
    for (mode, kind, precision), found in result.speeds.items():
        if precision == "int8":
            assert found.decode_tokens_s > result.speeds[mode, kind, "fp16"].decode_tokens_s
        if kind == "sparse":
            assert found.prefill_s < result.speeds[mode, "dense", precision].prefill_s
            assert found.decode_tokens_s > result.speeds[mode, "dense", precision].decode_tokens_s
    assert {mode for mode, _, _ in result.speeds} == {"MAXN", "15 W", "30 W", "50 W"}


def test_decode_of_one_sequence_is_bound_by_the_bytes_it_reads() -> None:
    """A hand calculation: dense FP16, one token of context, MAXN of an Orin."""
    config = dense(QWEN)
    found = speed(config, ORIN, modes_of(ORIN)[0], FLOAT, 1, 1)
    read = sum(weight_bytes(config, ORIN, FLOAT)[0].values()) + 28 * 2 * 2 * (128 + 4)
    assert found.decode_tokens_s == pytest.approx(204.8e9 / read)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.pt"
    assert main(["init", "edgepool-tiny", "-o", str(model)]) == 0
    capsys.readouterr()
    for target in load_targets():
        arguments = ["plan", str(model), "--target", target, "--context", "4096"]
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 100
        assert "KV pages" in printed
        assert ("estimate" in printed) == (target != "cpu")
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["memory"]["int8"]["total"] > record["memory"]["int8"]["state"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "--context 0: choose 1 to 4096"),
        ({"context": 4097}, "choose 1 to 4096"),
        ({"context": 1, "batch": 0}, "--batch 0"),
    ],
)
def test_bad_input(options: dict[str, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        plan(TINY, ORIN, **options)
