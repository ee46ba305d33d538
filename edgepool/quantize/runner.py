"""Running token sequences through a graph, chunk by chunk, with the state carried along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from ..config import ModelConfig, state_specs
from ..errors import BadInput, MissingRequirement, out_of_memory
from ..onnxfile import NUMPY_TYPES

CHUNK = 256  # tokens per step


def open_graph(graph: onnx.ModelProto, folder: Path) -> ort.InferenceSession:
    """A CPU session over a graph whose weights are external data in `folder`.

    INT8 products are exact: without VNNI the faster kernels for signed weights saturate, and
    activations of weight-only linears stay float.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(folder.resolve())
    )
    try:
        return ort.InferenceSession(
            graph.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # every exception of onnxruntime derives from Exception only
        if out_of_memory(error):
            raise MissingRequirement(f"{folder}: out of memory while loading the graph") from error
        raise BadInput(f"{folder}: ONNX Runtime cannot load the graph: {error}") from error


class Stepper:
    """One batch of sequences over a cache of `capacity` tokens each.

    feeds are the inputs of the last step, with the state before it.
    """

    def __init__(
        self, session: ort.InferenceSession, config: ModelConfig, batch: int, capacity: int
    ):
        pages = -(-capacity // config.page_size)
        types = {value.name: NUMPY_TYPES.get(value.type) for value in session.get_inputs()}
        sizes = {"batch": batch, "pages": 1 + batch * pages}
        self._session = session
        self._page_size = config.page_size
        self._outputs = [value.name for value in session.get_outputs()]
        self._table = np.arange(1, 1 + batch * pages, dtype=np.int32).reshape(batch, pages)
        self.past = np.zeros(batch, np.int32)
        self.state = {
            spec.name: np.zeros(
                [sizes[n] if isinstance(n, str) else n for n in spec.shape], types[spec.name]
            )
            for spec in state_specs(config)
            if spec.name in types
        }
        self.feeds: dict[str, np.ndarray] = {}

    def step(self, ids: np.ndarray, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Append [B,S] tokens; returns the graph's outputs but the state. rows get logits."""
        batch, count = ids.shape
        used = -(-int(self.past.max() + count) // self._page_size)
        self.feeds = {
            "input_ids": np.ascontiguousarray(ids, np.int32),
            "page_table": np.ascontiguousarray(self._table[:, :used]),
            "past_len": self.past.copy(),
            "new_len": np.full(batch, count, np.int32),
            "logit_rows": np.tile(np.array(rows, np.int32), (batch, 1)),
            **self.state,
        }
        wanted = {value.name for value in self._session.get_inputs()}
        feeds = {name: array for name, array in self.feeds.items() if name in wanted}
        try:
            results = dict(zip(self._outputs, self._session.run(self._outputs, feeds)))
        except Exception as error:  # every exception of onnxruntime derives from Exception only
            if out_of_memory(error):
                raise MissingRequirement("out of memory: take shorter samples") from error
            raise
        self.past = self.past + np.int32(count)
        for name in self.state:
            self.state[name] = results.pop(f"{name}_out")
        return results


def run_sequence(
    session: ort.InferenceSession, config: ModelConfig, ids: np.ndarray, chunk: int = CHUNK
) -> Iterator[tuple[Stepper, dict[str, np.ndarray]]]:
    """Feed one sequence from an empty cache; logits of every token, where the graph has them."""
    stepper = Stepper(session, config, 1, len(ids))
    for begin in range(0, len(ids), chunk):
        part = ids[None, begin : begin + chunk]
        yield stepper, stepper.step(part, range(part.shape[1]))
