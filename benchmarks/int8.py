"""INT8 against FP32 on ONNX Runtime: decode speed and memory of a quantised bundle, in one run.

    python -m benchmarks.int8 BUNDLE [--context 4096] [-o benchmarks/results]

Batch 1, pools pre-filled, edgepool's own session. The two take turns of several steps, so that a
machine that slows down slows both; figures are medians. Memory is what a process of its own has
more after a step than before it loads the graph: weights as ONNX Runtime keeps them, and pools.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
from pathlib import Path

import numpy as np
import onnxruntime as ort

from edgepool.bundle import Bundle
from edgepool.config import ModelConfig, state_specs
from edgepool.runtime.ort_session import OrtBackend
from edgepool.runtime.session import physical_pages

from .decode import in_turn


def graphs(path: Path) -> dict[str, tuple[Path, ModelConfig]]:
    """The bundle's FP32 and INT8 graphs, each with the configuration of its state."""
    bundle = Bundle.open(path)
    made = bundle.manifest["quantization"]
    return {
        "fp32": (bundle.model_path, bundle.config),
        "int8": (bundle.file(made["model"]), bundle.config_of("int8")),
    }


class Decoder:
    """One graph at `context` tokens, its pools filled with random numbers."""

    def __init__(self, path: Path, config: ModelConfig, context: int, threads: int):
        pages = physical_pages(config, 1, context)
        self._backend = OrtBackend(path, config, 1, pages, threads)
        self._table = np.arange(1, pages, dtype=np.int32)[None]
        self._past = np.array([context - 1], np.int32)
        source = np.random.default_rng(0)
        for spec in state_specs(config):
            value = self._backend.state[spec.name]
            shape, kind = value.shape(), value.data_type()
            if kind == "tensor(int8)":
                value.update_inplace(source.integers(-127, 128, shape, dtype=np.int8))
            else:
                scale = (
                    1 / 127 if spec.name.startswith(("k_scale", "v_scale", "index_scale")) else 1
                )
                value.update_inplace(
                    np.abs(source.standard_normal(shape, dtype=np.float32)) * np.float32(scale)
                )

    def step(self) -> None:
        one, first = np.ones(1, np.int32), np.zeros((1, 1), np.int32)
        self._backend.step(first, self._table, self._past, one, first)


def memory(path: Path, config: ModelConfig, context: int, threads: int) -> int:
    """Bytes that this process has more after a step than before it loads the graph."""
    before = resident()
    decoder = Decoder(path, config, context, threads)
    decoder.step()
    return resident() - before


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(path: Path, context: int, threads: int, turns: int) -> dict[str, object]:
    found = graphs(path)
    used = {}
    for name, (graph, config) in found.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            used[name] = pool.apply(memory, (graph, config, context, threads))
    decoders = {name: Decoder(*graph, context, threads) for name, graph in found.items()}
    runs = {name: decoder.step for name, decoder in decoders.items()}
    seconds = in_turn(runs, turns, warm=2, counted=8)
    medians = {name: np.median(times, axis=1) for name, times in seconds.items()}
    return {
        "context": context,
        "median_ms": {name: 1e3 * float(np.median(times)) for name, times in seconds.items()},
        "times_faster": float(np.median(medians["fp32"] / medians["int8"])),
        "memory_mib": {name: size / 2**20 for name, size in used.items()},
        "memory_ratio": used["int8"] / used["fp32"],
        "threads": threads,
        "machine": f"{platform.machine()}, onnxruntime {ort.__version__}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    result = measure(options.bundle, options.context, options.threads, options.turns)
    print(json.dumps(result, indent=1))
    if options.output is not None:
        (options.output / "int8.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
