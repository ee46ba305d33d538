"""How much each linear layer's output suffers from INT8: measured on real inputs, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from . import blocks, qdq
from .inputs import LinearInputs
from .linears import Group
from .smooth import HALF
from .source import Source

ROWS = 256  # tokens that are looked at


@dataclass(frozen=True)
class Sensitivity:
    """|error| / |output| of a group's linears: from INT8 inputs, and from INT8 weights."""

    group: str
    inputs: float
    weights: float
    scale: float


def sensitivities(source: Source, rounded: Mapping[str, np.ndarray]) -> list[Sensitivity]:
    """Measure every group, in the order of the graph, on the end of calibration's sample.

    rounded: the INT8 values of the weights, see `rounding`.
    """
    inputs = LinearInputs(source.bundle, source.weights.rotation, source.groups)
    values: dict[str, np.ndarray] = {}
    for _, outputs in inputs.steps(source.calibration.sample[-1]):
        values = outputs
    return [_measure(source, group, values[group.name], rounded) for group in source.groups]


def _measure(
    source: Source, group: Group, values: np.ndarray, rounded: Mapping[str, np.ndarray]
) -> Sensitivity:
    x = values.reshape(-1, values.shape[-1])[-ROWS:]
    divisor = source.smoothing.groups.get(group.name)
    x = x if divisor is None else x / divisor
    scale = qdq.activation_scale(group, source.calibration.tensors[group.name], source.smoothing)
    lost = _nearest(x, scale) - x
    if group.name in source.halved():
        lost -= _nearest(HALF * lost, scale) / HALF
    signal = from_inputs = from_weights = 0.0
    for linear in group.linears:
        matrix, whole = source.weights.read(linear.weight), rounded[linear.weight]
        rows, columns, step = qdq.factors(matrix, source.smoothing, linear)
        if linear.turned:  # [out, in]: the vocabulary, a sample of which says enough
            some = slice(None, None, max(1, len(matrix) // 4096))
            exact = blocks.scaled(matrix[some], rows[some], columns).T
            lossy = (whole[some] * step[some, None]).T
        else:
            exact, lossy = blocks.scaled(matrix, rows, columns), whole * step
        signal += float(np.square(x @ exact).sum(dtype=np.float64))
        from_inputs += float(np.square(lost @ exact).sum(dtype=np.float64))
        from_weights += float(np.square(x @ (lossy - exact)).sum(dtype=np.float64))
    if not signal:
        return Sensitivity(group.name, 0.0, 0.0, scale)
    return Sensitivity(
        group.name, (from_inputs / signal) ** 0.5, (from_weights / signal) ** 0.5, scale
    )


def _nearest(x: np.ndarray, scale: float) -> np.ndarray:
    return np.clip(np.rint(x / scale), -128, 127) * np.float32(scale)
