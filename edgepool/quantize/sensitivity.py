"""How much each linear layer's output suffers from INT8: measured on real inputs, one at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..exporter.lower import runnable
from ..exporter.probe import read_graph, watch
from . import blocks, qdq
from .linears import Group, groups
from .runner import CHUNK, open_graph, run_sequence
from .source import Source

ROWS = 256  # tokens that are looked at


@dataclass(frozen=True)
class Sensitivity:
    """|error| / |output| of a group's linears: from INT8 inputs, and from INT8 weights."""

    group: str
    inputs: float
    weights: float
    scale: float


def sensitivities(source: Source, ids: np.ndarray) -> list[Sensitivity]:
    """Measure every group on the last ROWS of the tokens [n] int32, in the order of the graph."""
    path = source.bundle.model_path
    graph = runnable(read_graph(path))
    found = groups(graph.graph)
    watch(graph, [group.value for group in found])
    index = [value.name for value in graph.graph.output].index("logits")
    del graph.graph.output[index]
    values: dict[str, np.ndarray] = {}
    session = open_graph(graph, path.parent)
    for _, outputs in run_sequence(session, source.bundle.config, ids, CHUNK):
        values = outputs
    return [_measure(source, group, values[group.value]) for group in found]


def _measure(source: Source, group: Group, values: np.ndarray) -> Sensitivity:
    x = values.reshape(-1, values.shape[-1])[-ROWS:]
    divisor = source.smoothing.groups.get(group.name)
    x = x if divisor is None else x / divisor
    scale = qdq.activation_scale(group, source.calibration.tensors[group.name], source.smoothing)
    lost = np.clip(np.rint(x / scale), -128, 127) * np.float32(scale) - x
    signal = from_inputs = from_weights = 0.0
    for linear in group.linears:
        matrix = source.weights.read(linear.weight)
        if linear.turned:  # [out, in]: the vocabulary, a sample of which says enough
            matrix = matrix[:: max(1, len(matrix) // 4096)]
        rows, columns = source.smoothing.factors(linear, matrix.shape)
        exact = blocks.scaled(matrix, rows, columns)
        exact = exact.T if linear.turned else exact
        step = np.abs(exact).max(0) / qdq.LEVELS
        step[step == 0] = 1
        rounded = np.rint(exact / step) * step - exact
        signal += float(np.square(x @ exact).sum(dtype=np.float64))
        from_inputs += float(np.square(lost @ exact).sum(dtype=np.float64))
        from_weights += float(np.square(x @ rounded).sum(dtype=np.float64))
    if not signal:
        return Sensitivity(group.name, 0.0, 0.0, scale)
    return Sensitivity(
        group.name, (from_inputs / signal) ** 0.5, (from_weights / signal) ** 0.5, scale
    )
