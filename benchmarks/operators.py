"""Where the time of a decode step goes, by ONNX Runtime's profiler: sparse beside dense.

    python -m benchmarks.operators [--context 1024] [--threads 2]

The graphs and sessions are those of `decode.py`. The large operators are profiled. The small ones
are what is left of a step that runs without the profiler, which adds microseconds to each of them.
All figures are lower quartiles: what other programs take from the machine is in the upper ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import onnxruntime as ort

from .decode import Dense, Sparse, in_turn, smollm2_shape, write_graphs

COPIED = 1 << 16  # bytes that a Gather of pages writes at least
STEPS = 40
MODELS: dict[str, Callable[..., Dense | Sparse]] = {"dense": Dense, "sparse": Sparse}


def part_of(event: dict) -> str:
    """What an operator of `decode.py`'s graphs is for, by the profiler's event of it."""
    arguments = event["args"]
    op = arguments["op_name"]
    if op == "GroupQueryAttention":
        return "attention"
    if op in ("Gather", "GatherND") and int(arguments["output_size"]) >= COPIED:
        return "copies of pages"
    if op not in ("MatMul", "FusedMatMul", "Gemm"):
        return "small"
    operands = arguments["input_type_shape"]  # a weight that was packed when it was loaded lacks
    rank = len(next(iter(operands[1].values()))) if len(operands) > 1 else 2
    return {2: "weights", 3: "index"}.get(rank, "attention")


@contextlib.contextmanager
def profiled(folder: Path) -> Iterator[None]:
    """Sessions that are opened inside write a profile into the folder when they end."""
    plain = ort.SessionOptions

    def options() -> ort.SessionOptions:
        made = plain()
        made.enable_profiling = True
        made.profile_file_prefix = str(folder / "profile")
        return made

    with mock.patch.object(ort, "SessionOptions", options):
        yield


def parts_of(session: ort.InferenceSession, steps: int) -> dict[str, tuple[float, float]]:
    """(milliseconds, operators) of a step by part, from a profiled session."""
    events = json.loads(Path(session.end_profiling()).read_text())
    times: dict[tuple[str, str], list[int]] = {}
    for event in events:
        name = event["name"]
        if name.endswith("_kernel_time") and event["args"]["op_name"] != "If":  # it holds others
            times.setdefault((part_of(event), name), []).append(event["dur"])
    parts: dict[str, tuple[float, float]] = {}
    for (part, _), found in times.items():
        time, count = parts.get(part, (0.0, 0.0))
        each = len(found) / steps
        parts[part] = (time + float(np.quantile(found, 0.25)) * each / 1e3, count + each)
    return parts


def measure(folder: Path, context: int, threads: int) -> dict[str, dict[str, tuple[float, float]]]:
    """(milliseconds, operators) of a step by model and part; `small` by difference."""
    config = smollm2_shape(context)
    write_graphs(folder, config)

    def opened(name: str) -> Dense | Sparse:
        return MODELS[name](folder / f"{name}.onnx", config, context, threads)

    models = {name: opened(name) for name in MODELS}
    runs: dict[str, Callable[[], None]] = {
        name: partial(model.step, context - 1, 1) for name, model in models.items()
    }
    seconds = in_turn(runs, turns=20, warm=2, counted=6)
    del models, runs
    result = {}
    for name in MODELS:
        with profiled(folder):
            model = opened(name)
        for _ in range(STEPS):
            model.step(context - 1, 1)
        session = model.session if isinstance(model, Dense) else model.backend._session
        parts = parts_of(session, STEPS)
        step = float(np.quantile(seconds[name], 0.25)) * 1e3
        large = sum(time for part, (time, _) in parts.items() if part != "small")
        result[name] = {**parts, "small": (step - large, parts["small"][1])}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = measure(Path(name), options.context, options.threads)
    print(f"{'one step, milliseconds (operators)':36s}" + "".join(f"{m:>16s}" for m in result))
    for part in ("weights", "attention", "copies of pages", "index", "small"):
        cells = [result[name].get(part, (0.0, 0.0)) for name in result]
        print(f"{part:36s}" + "".join(f"{time:9.2f} ({count:4.0f})" for time, count in cells))
    totals = [[sum(x) for x in zip(*parts.values())] for parts in result.values()]
    print(f"{'all':36s}" + "".join(f"{time:9.2f} ({count:4.0f})" for time, count in totals))


if __name__ == "__main__":
    main()
