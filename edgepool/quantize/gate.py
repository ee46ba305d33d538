"""The accuracy gate: INT8 against FP32 on held-out text, layer by layer and end to end."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BadInput, GateFailed
from ..progress import Report
from .compare import Comparison, Graph, compare
from .page import page
from .sensitivity import Sensitivity
from .source import Source

TOKENS = 4096  # of held-out text: all that calibration keeps back
REPORT, PAGE = "quantization.json", "quantization.html"
REPORTS = (REPORT, PAGE)
NAMED = 3  # layers that a failure names

Judge = Callable[[Collection[str]], Comparison]


@dataclass(frozen=True)
class Limits:
    """perplexity: the largest increase in per cent; agreement: the smallest, in per cent."""

    perplexity: float = 1.0
    agreement: float = 93.0

    def passed_by(self, comparison: Comparison) -> bool:
        close = comparison.perplexity_increase <= self.perplexity
        return bool(close and comparison.agreement >= self.agreement)


@dataclass(frozen=True)
class Verdict:
    """What passed: the groups with float inputs, its comparison, and every set that was tried."""

    float_inputs: tuple[str, ...]
    comparison: Comparison
    sensitivities: list[Sensitivity]
    limits: Limits
    curve: list[dict[str, float]]

    def summary(self, source: Source) -> dict[str, Any]:
        """For the manifest."""
        return {
            "float_inputs": list(self.float_inputs),
            "halved_inputs": list(source.halved(self.float_inputs)),
            "int8_multiply_adds": source.int8_share(self.float_inputs),
            "int8_multiply_adds_once": source.int8_share({*self.float_inputs, *source.halved()}),
            "gate": judged(self.comparison, self.limits),
        }


def judged(c: Comparison, limits: Limits) -> dict[str, Any]:
    """A comparison's figures, and the limits that they were held to."""
    return {
        "tokens": c.positions,
        "perplexity_fp32": c.perplexities[0],
        "perplexity": c.perplexities[1],
        "perplexity_increase": c.perplexity_increase,
        "perplexity_error": c.perplexity_error,
        "top1_agreement": c.agreement,
        "kl": c.kl,
        "limits": vars(limits),
    }


def judge(source: Source, path: Path, ids: np.ndarray, report: Report) -> Comparison:
    """Compare the INT8 graph at `path` with the bundle's own on the tokens."""
    reference = Graph(source.bundle.model_path, source.bundle.config)
    basis = source.weights.rotation.residual
    return compare(reference, Graph(path, source.config, basis), ids, report=report)


def decide(
    source: Source,
    float_inputs: Collection[str],
    auto: bool,
    limits: Limits,
    measured: list[Sensitivity],
    judge: Judge,
) -> Verdict:
    """Judge one set of groups with float inputs, or with `auto` find the smallest that passes.

    `auto` adds the groups in the order of what INT8 inputs cost them: twice as many each time until
    it passes, then fewer by bisection. `judge` leaves the graph of the last set behind.
    """
    curve: list[dict[str, float]] = []

    def tried(names: Collection[str]) -> Comparison:
        comparison = judge(names)
        curve.append(
            {
                "float_inputs": len(names),
                "int8_multiply_adds": source.int8_share(names),
                "perplexity_increase": comparison.perplexity_increase,
                "top1_agreement": comparison.agreement,
                "kl": comparison.kl,
            }
        )
        return comparison

    if not auto:
        comparison = tried(float_inputs)
        if not limits.passed_by(comparison):
            raise GateFailed(failure(comparison, measured, float_inputs, limits))
        return Verdict(tuple(float_inputs), comparison, measured, limits, curve)
    ranked = [s.group for s in sorted(measured, key=lambda s: -s.inputs)]
    failed, count = -1, 0
    comparison = tried(())
    while not limits.passed_by(comparison):
        if count == len(ranked):
            raise GateFailed(failure(comparison, measured, ranked, limits))
        failed, count = count, min(2 * count or 1, len(ranked))
        comparison = tried(ranked[:count])
    last = count
    while count - failed > 1:
        last = (failed + count) // 2
        other = tried(ranked[:last])
        if limits.passed_by(other):
            count, comparison = last, other
        else:
            failed = last
    if last != count:
        comparison = judge(ranked[:count])
    return Verdict(tuple(ranked[:count]), comparison, measured, limits, curve)


def failure(
    comparison: Comparison, measured: list[Sensitivity], chosen: Collection[str], limits: Limits
) -> str:
    """One line: by how much it failed, which layers lost most, what to do."""
    lost = {s.group: max(s.weights, 0 if s.group in chosen else s.inputs) for s in measured}
    worst = sorted(lost, key=lambda name: -lost[name])[:NAMED]
    named = ", ".join(f"{name} ({100 * lost[name]:.1f} % of its output)" for name in worst)
    return (
        f"INT8 costs {comparison.perplexity_increase:+.2f} % perplexity (limit "
        f"{limits.perplexity:g} %) and agrees on {comparison.agreement:.1f} % of tokens (limit "
        f"{limits.agreement:g} %); most is lost in {named}: calibrate on more data, or let --auto "
        "choose what stays float"
    )


def write_report(verdict: Verdict, source: Source, folder: Path) -> None:
    """Write quantization.json and quantization.html into a bundle's folder."""
    c = verdict.comparison
    tensors = source.calibration.tensors
    readers = {group.name: [linear.name for linear in group.linears] for group in source.groups}
    record = {
        **verdict.summary(source),
        "data": source.calibration.data,
        "method": source.calibration.method,
        "curve": verdict.curve,
        "layers": {
            name: {"relative": error.relative, "cosine": error.cosine}
            for name, error in c.layers.items()
        },
        "groups": {
            s.group: {
                "readers": readers[s.group],
                "int8_inputs": s.group not in verdict.float_inputs,
                "halved": s.group in source.halved(verdict.float_inputs),
                "lowest": tensors[s.group].lowest,
                "highest": tensors[s.group].highest,
                "scale": s.scale,
                "input_error": s.inputs,
                "weight_error": s.weights,
            }
            for s in verdict.sensitivities
        },
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (folder / REPORT).write_text(text + "\n", encoding="utf-8")
    (folder / PAGE).write_text(page(record), encoding="utf-8")


def read_report(bundle_path: Path) -> dict[str, Any]:
    """The report of a quantised bundle; raises BadInput where there is none."""
    try:
        record = json.loads((bundle_path / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{bundle_path / REPORT}: cannot be read: quantize again") from error
    return dict(record)
