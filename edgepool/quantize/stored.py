"""The weights of a bundle's graph, read one at a time from the file that holds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from ..exporter.probe import read_graph


@dataclass(frozen=True)
class StoredWeights:
    """Initialisers of model.onnx by name; `read` maps the bytes of one, nothing is kept.

    The mapping is private: whoever changes an array changes a copy, never the file.
    """

    folder: Path
    graph: onnx.GraphProto
    tensors: dict[str, onnx.TensorProto]

    @classmethod
    def of(cls, path: Path) -> StoredWeights:
        graph = read_graph(path).graph
        return cls(path.parent, graph, {tensor.name: tensor for tensor in graph.initializer})

    def read(self, name: str) -> np.ndarray:
        """The tensor as the graph has it."""
        tensor = self.tensors[name]
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return numpy_helper.to_array(tensor)
        where = {entry.key: entry.value for entry in tensor.external_data}
        return np.memmap(
            self.folder / where["location"],
            onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type),
            "c",
            int(where.get("offset", 0)),
            tuple(tensor.dims),
        )
