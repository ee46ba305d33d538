"""Looking inside an exported file with ONNX Runtime: inner values as outputs, or fed as inputs.

The file is not changed and its weights are not copied: the probe is its graph with the weights as
references into the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from ..errors import GateFailed
from ..onnxfile import NUMPY_TYPES, skeleton
from ..ops.registry import DOMAIN

SELECTED = ".selected"  # how the outputs of IndexPoolSelect nodes end (simplify.py names them)
FED = "fed:"  # before the name of an inner value that is fed


def read_graph(path: Path) -> onnx.ModelProto:
    """The model without its weights, which are external data in the file itself."""
    return onnx.ModelProto.FromString(skeleton(str(path)))


def selections(model: onnx.ModelProto) -> list[str]:
    """The values that IndexPoolSelect nodes give, in the order of the graph."""
    return [
        name
        for node in model.graph.node
        if node.domain == DOMAIN
        for name in node.output
        if name.endswith(SELECTED)
    ]


def hidden_states(model: onnx.ModelProto) -> list[str]:
    """The values `hidden.I`: what each layer gives, in order."""
    names = {name for node in model.graph.node for name in node.output}
    count = sum(name.startswith("hidden.") for name in names)
    return [f"hidden.{i}" for i in range(count)]


def watch(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Make inner values outputs, in place."""
    known = {value.name: value for value in model.graph.value_info}
    model.graph.output.extend(known[name] for name in names)


def feed(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Let the readers of inner values read new inputs `fed:NAME` instead, in place."""
    known = {value.name: value for value in model.graph.value_info}
    for node in model.graph.node:
        node.input[:] = [FED + name if name in names else name for name in node.input]
    for name in names:
        value = model.graph.input.add()
        value.CopyFrom(known[name])
        value.name = FED + name


def cut(model: onnx.ModelProto, outputs: Collection[str], stop: Collection[str]) -> onnx.ModelProto:
    """The part of a model that computes `outputs` from the values in `stop` and the inputs."""
    producer = {name: node for node in model.graph.node for name in node.output}
    initializers = {tensor.name for tensor in model.graph.initializer}
    known = {v.name: v for v in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    needed, pending, inputs = set(), list(outputs), []
    while pending:
        name = pending.pop()
        if name in needed:
            continue
        needed.add(name)
        if name in stop and name not in outputs or name not in producer:
            if name not in initializers:
                inputs.append(name)
        else:
            pending += [value for value in producer[name].input if value]
    part = onnx.ModelProto()
    part.CopyFrom(model)
    graph = part.graph
    nodes = [n for n in model.graph.node if any(x in needed and x not in inputs for x in n.output)]
    for field, kept in (
        (graph.node, nodes),
        (graph.initializer, [t for t in model.graph.initializer if t.name in needed]),
        (graph.input, [known[name] for name in sorted(inputs)]),
        (graph.output, [known[name] for name in outputs]),
    ):
        del field[:]
        field.extend(kept)
    return part


class Probe:
    """An ONNX Runtime session over a (changed) graph whose weights are in `folder`."""

    def __init__(self, model: onnx.ModelProto, folder: Path):
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.enable_cpu_mem_arena = False  # it doubles what a session holds
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(folder.resolve())
        )
        try:
            self._session = ort.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # every exception of onnxruntime derives from Exception only
            raise GateFailed(f"ONNX Runtime cannot load the exported graph: {error}") from error
        self.inputs = {v.name: NUMPY_TYPES[v.type] for v in self._session.get_inputs()}
        self.shapes = {v.name: v.shape for v in self._session.get_inputs()}
        self.outputs = [value.name for value in self._session.get_outputs()]

    def run(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name. Values are cast to the inputs' types, and may be more than those."""
        feeds = {name: values[name].astype(t, copy=False) for name, t in self.inputs.items()}
        results = self._session.run(self.outputs, feeds)
        return dict(zip(self.outputs, results, strict=True))
