"""What the linear layers of a bundle's FP32 graph read, as the rotated model has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..bundle import Bundle
from ..exporter.lower import runnable
from ..exporter.probe import read_graph, watch
from .linears import Group
from .rotation import Rotation
from .runner import Stepper, open_graph, run_sequence


class LinearInputs:
    """An ONNX Runtime session over the graph, with the inputs of some groups as its outputs."""

    def __init__(self, bundle: Bundle, rotation: Rotation, groups: Sequence[Group]):
        graph = runnable(read_graph(bundle.model_path))
        self._config, self._rotation, self._groups = bundle.config, rotation, groups
        self._values = [rotation.watched(graph.graph, group) for group in groups]
        watch(graph, self._values)
        logits = [value.name for value in graph.graph.output].index("logits")
        del graph.graph.output[logits]  # the head is not run
        self._session = open_graph(graph, bundle.path)

    def steps(self, ids: np.ndarray) -> Iterator[tuple[Stepper, dict[str, np.ndarray]]]:
        """Run one sequence [n], chunk by chunk: inputs [B,S,C] float32 by the group's name."""
        for stepper, values in run_sequence(self._session, self._config, ids):
            yield (
                stepper,
                {
                    group.name: self._rotation.inputs(group, values.pop(value))
                    for group, value in zip(self._groups, self._values)
                },
            )
