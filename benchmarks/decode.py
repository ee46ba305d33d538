"""Decode and prefill of the whole model on ONNX Runtime: sparse attention against dense.

    python -m benchmarks.decode [--contexts 1024,4096,...] [--prefill 8192] [-o benchmarks/results]

SmolLM2-135M's shape with random weights, FP32, batch 1, pools pre-filled. `sparse` is the exported
portable graph at a budget of 1,024 tokens, run by edgepool's own session; `dense` is the best that
ONNX Runtime offers for the same weights (`dense.py`), its cache bound in place too. The two take
turns of several steps, so that a machine that slows down slows both; figures are medians.

The byte floor is the ratio of the bytes that each must read in a step: it is what the ratio of the
times would be if both ran at the bandwidth of the memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from edgepool.checkpoint import Retrofit, random_weights
from edgepool.config import ModelConfig, state_specs
from edgepool.exporter.export import hide_layers
from edgepool.exporter.lower import portable
from edgepool.exporter.stamp import model_skeleton
from edgepool.exporter.weights import weights_of, write_model
from edgepool.runtime.ort_session import OrtBackend
from edgepool.runtime.session import physical_pages

from .dense import dense_model

CHUNK = 512


def smollm2_shape(context: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_context=context,
        rope_theta=100000.0,
        tie_embeddings=True,
        **Retrofit(budget=1024).settings(30),
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes that one decode step reads at `context` tokens, by what they are (FP32)."""

    weights: int
    index: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.index + self.kv


def traffic(config: ModelConfig, weight_bytes: int, context: int, dense: bool) -> Traffic:
    """weights + per layer: pooled index (context / ratio vectors) + keys and values attended."""
    vector = config.num_kv_heads * config.head_dim * 4
    if dense:
        return Traffic(weight_bytes, 0, 2 * context * vector * config.num_layers)
    index = sum(context // config.index.ratio * vector for _ in range(config.num_layers))
    attended = sum(config.attended_tokens(i, context) for i in range(config.num_layers))
    return Traffic(weight_bytes, index, 2 * attended * vector)


class Sparse:
    """The exported graph with room for `context` tokens, its pools filled with random numbers."""

    def __init__(self, path: Path, config: ModelConfig, context: int, threads: int):
        pages = physical_pages(config, 1, context)
        self.backend = OrtBackend(path, config, 1, pages, threads)
        self.table = np.arange(1, pages, dtype=np.int32)[None]
        self.page = config.page_size
        rng = np.random.default_rng(0)
        for spec in state_specs(config):
            value = self.backend.state[spec.name]
            value.update_inplace(rng.standard_normal(value.shape(), dtype=np.float32))

    def step(self, past: int, new: int) -> None:
        used = -(-(past + new) // self.page)
        self.backend.step(
            np.zeros((1, new), np.int32),
            np.ascontiguousarray(self.table[:, :used]),
            np.array([past], np.int32),
            np.array([new], np.int32),
            np.array([[new - 1]], np.int32),
        )


class Dense:
    """The GroupQueryAttention graph with a cache of `context` tokens, bound in place."""

    def __init__(self, path: Path, config: ModelConfig, context: int, threads: int):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        rng = np.random.default_rng(0)
        shape = (1, config.num_kv_heads, context, config.head_dim)
        self.cache = []
        for i in range(config.num_layers):
            for part in "kv":
                filled = rng.standard_normal(shape, dtype=np.float32)
                value = ort.OrtValue.ortvalue_from_numpy(filled)
                self.binding.bind_ortvalue_input(f"past_{part}.{i}", value)
                self.binding.bind_ortvalue_output(f"present_{part}.{i}", value)
                self.cache.append(value)
        logits = np.zeros((1, 1, config.vocab_size), np.float32)
        self.logits = ort.OrtValue.ortvalue_from_numpy(logits)
        self.binding.bind_ortvalue_output("logits", self.logits)

    def step(self, past: int, new: int) -> None:
        inputs = {
            "input_ids": np.zeros((1, new), np.int32),
            "logit_rows": np.array([new - 1], np.int32),
            "seqlens_k": np.array([past + new - 1], np.int32),
            "total_length": np.array(past + new, np.int32),
        }
        for name, array in inputs.items():
            self.binding.bind_cpu_input(name, array)
        self.session.run_with_iobinding(self.binding)


def in_turn(
    runs: dict[str, Callable[[], None]], turns: int, warm: int, counted: int
) -> dict[str, np.ndarray]:
    """Seconds [turns, counted] of the calls: in its turn each makes `warm` ones, then counted ones.

    Turns of several calls, because a session's worker threads spin for a while after a call, for
    the next: where two sessions of one process take call after call in turn, each runs with a core
    that the other's workers burn, and nobody serves a model like that.
    """
    seconds: dict[str, list[list[float]]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            times = []
            for _ in range(warm + counted):
                started = time.perf_counter()
                run()
                times.append(time.perf_counter() - started)
            seconds[name].append(times[warm:])
    return {name: np.array(times) for name, times in seconds.items()}


def times_faster(seconds: dict[str, np.ndarray]) -> float:
    """Dense over sparse: the median over the turns, each of which has the machine of its minute."""
    dense, sparse = (np.median(seconds[name], axis=1) for name in ("dense", "sparse"))
    return float(np.median(dense / sparse))


def prefill(model: Sparse | Dense, tokens: int) -> None:
    for past in range(0, tokens, CHUNK):
        model.step(past, min(CHUNK, tokens - past))


def write_graphs(folder: Path, config: ModelConfig) -> int:
    """Both graphs with the same random weights; returns the bytes of weights that a step reads."""
    weights = {name: weight.read() for name, weight in random_weights(config, 0).items()}
    skeleton = model_skeleton(config, torch.float32)
    hide_layers(skeleton)
    write_model(portable(skeleton.model), weights_of(skeleton, weights), folder / "sparse.onnx")
    arrays = {name: weight.float().numpy() for name, weight in weights.items()}
    (folder / "dense.onnx").write_bytes(dense_model(config, arrays).SerializeToString())
    return sum(array.nbytes for array in arrays.values())


def measure(
    folder: Path, config: ModelConfig, weight_bytes: int, context: int, options: argparse.Namespace
) -> dict[str, object]:
    sparse = Sparse(folder / "sparse.onnx", config, context, options.threads)
    dense = Dense(folder / "dense.onnx", config, context, options.threads)
    seconds = in_turn(
        {
            "sparse": lambda: sparse.step(context - 1, 1),
            "dense": lambda: dense.step(context - 1, 1),
        },
        options.turns,
        warm=2,
        counted=6,
    )
    row: dict[str, object] = {"context": context}
    for name, times in seconds.items():
        read = traffic(config, weight_bytes, context, name == "dense")
        row[name] = {
            "median_ms": float(np.median(times)) * 1e3,
            "min_ms": float(times.min()) * 1e3,
            "max_ms": float(times.max()) * 1e3,
            "bytes": {**asdict(read), "total": read.total},
            "gb_per_s": read.total / float(np.median(times)) / 1e9,
        }
    row["speedup"] = times_faster(seconds)
    row["byte_floor"] = row["dense"]["bytes"]["total"] / row["sparse"]["bytes"]["total"]
    return row


def measure_prefill(folder: Path, config: ModelConfig, tokens: int, options) -> dict[str, object]:
    sparse = Sparse(folder / "sparse.onnx", config, tokens, options.threads)
    dense = Dense(folder / "dense.onnx", config, tokens, options.threads)
    seconds = in_turn(
        {"sparse": lambda: prefill(sparse, tokens), "dense": lambda: prefill(dense, tokens)},
        options.prefill_turns,
        warm=0,
        counted=1,
    )
    return {
        "tokens": tokens,
        "chunk": CHUNK,
        "sparse_tokens_per_s": tokens / float(np.median(seconds["sparse"])),
        "dense_tokens_per_s": tokens / float(np.median(seconds["dense"])),
        "speed_of_dense": times_faster(seconds),
    }


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    context = [row["context"] for row in rows]
    for name, colour in (("dense", "tab:red"), ("sparse", "tab:blue")):
        left.plot(context, [r[name]["median_ms"] for r in rows], "o-", color=colour, label=name)
        rate = max(r[name]["gb_per_s"] for r in rows)
        floor = [r[name]["bytes"]["total"] / rate / 1e6 for r in rows]
        left.plot(context, floor, ":", color=colour, label=f"{name}: bytes at {rate:.0f} GB/s")
    right.plot(context, [r["speedup"] for r in rows], "o-", label="measured")
    right.plot(context, [r["byte_floor"] for r in rows], ":", label="byte floor")
    right.axhline(1, color="grey", linewidth=0.5)
    for axes, title in ((left, "decode step, ms"), (right, "sparse over dense, times faster")):
        axes.set(xscale="log", xlabel="tokens of context", title=title)
        axes.set_xticks(context, [f"{n // 1024}K" for n in context])
        axes.minorticks_off()
        axes.legend()
    left.set_yscale("log")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default="1024,4096,8192,16384,65536")
    parser.add_argument("--turns", type=int, default=5, help="of 2 steps and 6 that count")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens; 0: leave it out")
    parser.add_argument("--prefill-turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    contexts = [int(n) for n in options.contexts.split(",")]
    config = smollm2_shape(max([*contexts, options.prefill]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weight_bytes = write_graphs(folder, config)
        print("context   dense ms  sparse ms  faster  byte floor  of floor   dense MB  sparse MB")
        rows = []
        for context in contexts:
            row = measure(folder, config, weight_bytes, context, options)
            rows.append(row)
            dense, sparse = row["dense"], row["sparse"]
            print(
                f"{context:7d} {dense['median_ms']:10.1f} {sparse['median_ms']:10.1f}"
                f" {row['speedup']:7.2f} {row['byte_floor']:11.2f}"
                f" {row['speedup'] / row['byte_floor']:9.0%}"
                f" {dense['bytes']['total'] / 1e6:10.0f} {sparse['bytes']['total'] / 1e6:10.0f}",
                flush=True,
            )
        result = {
            "model": "SmolLM2-135M's shape, random weights, FP32",
            "budget_tokens": 1024,
            "threads": options.threads,
            "onnxruntime": ort.__version__,
            "machine": platform.machine(),
            "decode": rows,
        }
        if options.prefill:
            prefilled = measure_prefill(folder, config, options.prefill, options)
            result["prefill"] = prefilled
            print(
                f"prefill of {options.prefill} tokens in chunks of {CHUNK}: dense"
                f" {prefilled['dense_tokens_per_s']:.0f} tokens/s, sparse"
                f" {prefilled['sparse_tokens_per_s']:.0f} ({prefilled['speed_of_dense']:.2f} x)"
            )
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "decode.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(rows, options.output / "decode.png")
    print(f"wrote {options.output}/decode.json and decode.png")


if __name__ == "__main__":
    main()
