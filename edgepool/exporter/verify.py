"""`edgepool verify`: a bundle against the model.pt, output by output and layer by layer."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..bundle import Bundle
from ..checkpoint import Checkpoint, load
from ..errors import BadInput
from ..model import Model
from ..progress import Report, silent
from . import by_layer, lower, parity
from .probe import read_graph
from .prove import proved_by_layer, text_tokens
from .schedule import plan

DECODE_STEPS = 8
# Largest |difference| of a value inside the model, as a part of its tensor's rms. Logits have the
# limit of parity.TOLERANCES; INT8 pages may differ by one step.
INNER_TOLERANCES = {"fp32": 5e-3, "fp16": 0.25}
INT8_TOLERANCE = 5e-2  # inner values of a model with INT8 pages


@dataclass(frozen=True)
class Difference:
    """One output or inner value: the largest |difference| over all steps, its limit, the rms."""

    name: str
    largest: float
    mean: float
    limit: float
    rms: float
    passed: bool


@dataclass(frozen=True)
class Verification:
    """All differences, outputs first, then layers; same_source: the bundle is from this file."""

    differences: list[Difference]
    outcome: parity.Outcome
    same_source: bool

    @property
    def passed(self) -> bool:
        """Values within their limits, and selections, greedy tokens and stored values too."""
        return all(d.passed for d in self.differences) and self.outcome.fault() is None


def verify(bundle_path: Path, checkpoint_path: Path, report: Report = silent) -> Verification:
    """Check every file's sha256, then run model.onnx and PyTorch on the same steps.

    Polygraphy's comparator decides. Raises BadInput for a damaged bundle, and for a checkpoint of
    another configuration.
    """
    bundle = Bundle.open(bundle_path)
    bundle.verify()
    checkpoint = load(checkpoint_path)
    config = dataclasses.replace(checkpoint.config, max_context=bundle.config.max_context)
    if config != bundle.config:
        raise BadInput(
            f"{checkpoint_path}: its configuration is not that of {bundle_path}: "
            "name the model.pt that the bundle was exported from"
        )
    checkpoint = dataclasses.replace(checkpoint, config=config)
    mine: dict[str, list[np.ndarray]] = defaultdict(list)
    theirs: dict[str, list[np.ndarray]] = defaultdict(list)

    def observe(got: parity.Arrays, expected: parity.Arrays) -> None:
        for name, values in expected.items():
            mine[name].append(got[name].reshape(-1))
            theirs[name].append(values.reshape(-1))

    def forget() -> None:
        mine.clear()
        theirs.clear()

    outcome = _run(bundle, checkpoint, report, observe, forget)
    differences = compare_outputs(
        {name: np.concatenate(parts) for name, parts in mine.items()},
        {name: np.concatenate(parts) for name, parts in theirs.items()},
        bundle.manifest["dtype"],
        INT8_TOLERANCE if config.kv_dtype == "int8" else 0.0,
    )
    same = checkpoint.source == bundle.manifest["source_digest"]
    return Verification(differences, outcome, same)


def _run(
    bundle: Bundle,
    checkpoint: Checkpoint,
    report: Report,
    observe: parity.Observe,
    forget: Callable[[], None],
) -> parity.Outcome:
    graph = lower.runnable(read_graph(bundle.model_path))
    dtype, text = bundle.manifest["dtype"], text_tokens(checkpoint)
    if proved_by_layer(checkpoint):
        schedule = by_layer.short_plan(checkpoint.config, text)
        return by_layer.compare(
            graph, bundle.path, checkpoint, schedule, dtype, report, observe=observe
        )
    schedule = plan(checkpoint.config, text, DECODE_STEPS)
    model = Model.from_checkpoint(checkpoint)
    once = (graph, bundle.path, parity.steps_of(model, schedule), dtype)
    outcome = parity.compare_once(*once, False, report, observe=observe)
    if outcome.selection_flips:
        forget()
        outcome = parity.compare_once(*once, True, report, observe=observe)
    return outcome


def compare_outputs(
    mine: parity.Arrays, theirs: parity.Arrays, dtype: str, at_least: float = 0.0
) -> list[Difference]:
    """Polygraphy's judgement of every value; logits first, then layers, then state.

    at_least: a lower bound of the tolerance of inner values.
    """
    from polygraphy.comparator import IterationResult, SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    rms = {name: _rms(values) for name, values in theirs.items()}
    inner = max(INNER_TOLERANCES[dtype], at_least)
    limits = {name: _limit(name, x, dtype, inner * rms[name]) for name, x in theirs.items()}
    compare = SimpleCompareFunc(atol=limits, rtol=0.0, check_error_stat="max")
    sides = (("onnxruntime", mine), ("pytorch", theirs))
    results = [IterationResult(dict(values), runner_name=name) for name, values in sides]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        judged = compare(*results)
    return [
        Difference(
            name,
            float(judged[name].max_absdiff),
            float(judged[name].mean_absdiff),
            limits[name],
            rms[name],
            bool(judged[name]),
        )
        for name in sorted(judged, key=_order)
    ]


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def _limit(name: str, values: np.ndarray, dtype: str, inner: float) -> float:
    if name == "logits":
        return parity.TOLERANCES[dtype]
    if values.dtype == np.int8:
        return 1.0
    return inner


def _order(name: str) -> tuple[int, str, int]:
    kind, _, number = name.removesuffix("_out").partition(".")
    return {"logits": 0, "hidden": 1}.get(kind, 2), kind, int(number or 0)
