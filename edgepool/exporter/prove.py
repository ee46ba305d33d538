"""The gate of `edgepool export`: every graph of a bundle is compared with PyTorch.

Small models run whole (`parity.py`), large ones and INT8 pages one layer at a time (`by_layer.py`);
a graph of the float type float16 is judged in that arithmetic too (`half.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint
from ..config import ModelConfig
from ..model import Model
from ..progress import Report
from . import by_layer, half, lower, parity
from .probe import read_graph
from .reference import ReferenceLog
from .schedule import Schedule, plan

# With more FP32 weights than this, PyTorch and ONNX Runtime run one layer at a time.
WHOLE_MODEL_BYTES = 800_000_000

Seen = Callable[[parity.Reference], None]


def prove(
    folder: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    variants: dict[str, Any],
    dtype: str,
    report: Report,
) -> dict[str, Any]:
    """Compare every graph in the folder with PyTorch; writes reference.json.

    Returns what the manifest records: by graph, what was measured. Raises GateFailed.
    """
    text = text_tokens(checkpoint)
    checkpoint = dataclasses.replace(checkpoint, config=config)
    graphs = {"model.onnx": folder / "model.onnx"}
    graphs.update({v["model"]: folder / v["model"] for v in variants.values()})
    short, full = by_layer.short_plan(config, text), plan(config, text)
    if is_large(checkpoint):
        log = ReferenceLog(config, short)
        outcomes = in_layers(graphs, checkpoint, short, dtype, report, log.add)
    elif proved_by_layer(checkpoint):
        log = ReferenceLog(config, full)
        outcomes = in_layers(graphs, checkpoint, short, dtype, report, ignore)
        drift = whole(graphs["model.onnx"], checkpoint, full, dtype, report, log.add)
        outcomes["model.onnx"]["drift"] = drift.to_dict()
    else:
        log = ReferenceLog(config, full)
        outcomes = in_one(graphs, checkpoint, full, dtype, report, log.add)
    record = json.dumps(log.to_dict(), separators=(",", ":"))
    (folder / "reference.json").write_text(record + "\n", encoding="utf-8")
    return outcomes


def is_large(checkpoint: Checkpoint) -> bool:
    """Whether the model is too large for PyTorch and ONNX Runtime at once."""
    return sum(x.numel() for x in checkpoint.weights.values()) * 4 > WHOLE_MODEL_BYTES


def proved_by_layer(checkpoint: Checkpoint) -> bool:
    """Whether parity is taken layer by layer: large models, and INT8 pages (see parity.py)."""
    return is_large(checkpoint) or checkpoint.config.kv_dtype == "int8"


def ignore(reference: parity.Reference) -> None:
    """For steps of the reference that nobody looks at."""


def in_layers(
    graphs: Mapping[str, Path],
    checkpoint: Checkpoint,
    schedule: Schedule,
    dtype: str,
    report: Report,
    seen: Seen,
) -> dict[str, Any]:
    """What `by_layer.compare` says of every graph; float16 is judged beside the first."""
    outcomes: dict[str, Any] = {}
    for name, path in graphs.items():
        first = not outcomes
        rounded = half.HalfLayers() if first and dtype == "fp16" else None
        graph = lower.runnable(read_graph(path))
        outcome = by_layer.compare(
            graph,
            path.parent,
            checkpoint,
            schedule,
            dtype,
            report,
            seen if first else ignore,
            half=rounded,
        )
        outcomes[name] = required(name, outcome, rounded)
    return outcomes


def in_one(
    graphs: Mapping[str, Path],
    checkpoint: Checkpoint,
    schedule: Schedule,
    dtype: str,
    report: Report,
    seen: Seen,
) -> dict[str, Any]:
    """What `parity.compare` says of every graph; float16 is judged beside the first.

    The others differ from it in their form only: they run an excerpt of the schedule.
    """
    excerpt = parity.Excerpt(checkpoint.config, schedule)
    rounded = half.HalfModel(checkpoint, schedule) if dtype == "fp16" else None
    watchers = [seen]
    watchers += [excerpt.add] if len(graphs) > 1 else []
    watchers += [rounded.add] if rounded is not None else []

    def every(reference: parity.Reference) -> None:
        for watcher in watchers:
            watcher(reference)

    outcomes: dict[str, Any] = {}
    for name, path in graphs.items():
        if not outcomes:
            outcome = whole(path, checkpoint, schedule, dtype, report, every)
            outcomes[name] = required(name, outcome, rounded)
        else:
            graph = lower.runnable(read_graph(path))
            outcome = parity.compare(graph, path.parent, excerpt.steps(), dtype, report)
            outcomes[name] = required(name, outcome)
    return outcomes


def whole(
    path: Path,
    checkpoint: Checkpoint,
    schedule: Schedule,
    dtype: str,
    report: Report,
    seen: Seen,
) -> parity.Outcome:
    """`parity.compare` with the checkpoint's model, which is in memory for its time only."""
    steps = parity.steps_of(Model.from_checkpoint(checkpoint), schedule)
    return parity.compare(lower.runnable(read_graph(path)), path.parent, steps, dtype, report, seen)


def required(
    name: str,
    outcome: parity.Outcome,
    rounded: half.HalfLayers | half.HalfModel | None = None,
) -> dict[str, Any]:
    """The record of an outcome, and of float16's; raises GateFailed unless they pass."""
    outcome.require(name)
    if rounded is None:
        return outcome.to_dict()
    half.require(rounded.outcome)
    return {**outcome.to_dict(), "float16": rounded.outcome.to_dict()}


def text_tokens(checkpoint: Checkpoint) -> list[int]:
    """Tokens of an English text that every Python has; none without a tokenizer."""
    if checkpoint.tokenizer is None:
        return []
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    text = "\n\n".join(topics[name] for name in sorted(topics)[:40])
    return Tokenizer.from_str(checkpoint.tokenizer).encode(text[:40_000]).ids
