"""A session on ONNX Runtime: the state stays where it is, bound as input and output."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import onnxruntime as ort

from ..config import ModelConfig, state_specs
from ..errors import BadInput, MissingRequirement
from .session import Session, physical_pages

DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(int32)": np.int32,
}
STEP_INPUTS = ("input_ids", "page_table", "past_len", "new_len", "logit_rows")
PREFILL_CHUNK = 256
SCORE_BYTES = 512 << 20  # of one layer's scores in FP32; a step needs about three times that
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def open_session(
    model_path: Path,
    config: ModelConfig,
    batch: int = 1,
    capacity: Optional[int] = None,
    chunk: Optional[int] = None,
    threads: int = 0,
    device: str = "cpu",
) -> Session:
    """A session over an exported graph (`model.onnx` of a bundle).

    capacity  tokens per sequence (the model's whole context by default)
    chunk     the most tokens per sequence in one prefill step (by default, see `default_chunk`)
    threads   of ONNX Runtime; 0: one per physical core
    device    cpu or cuda
    Raises BadInput for a graph that does not fit the config, MissingRequirement without the device.
    """
    capacity = config.max_context if capacity is None else capacity
    pages = physical_pages(config, batch, capacity)
    backend = OrtBackend(model_path, config, batch, pages, threads, device)
    chunk = default_chunk(config, batch, capacity) if chunk is None else chunk
    return Session(config, backend, batch, capacity, chunk)


def default_chunk(config: ModelConfig, batch: int, capacity: int) -> int:
    """Tokens per prefill step: 256, or fewer if the attention scores of a step would be too large.

    Measured on SmolLM2 at 2K and 6K tokens: 128 to 512 are within 10 % of each other, 256 is best;
    less reads the weights and pages too often, more falls out of the caches.
    """
    chunk = PREFILL_CHUNK
    while chunk > 32 and 4 * batch * config.num_heads * chunk * capacity > SCORE_BYTES:
        chunk //= 2
    return chunk


class OrtBackend:
    """Runs steps of the graph (`session.Backend`).

    Each state tensor is one buffer that is input and output at once; ScatterND then updates it in
    place, so a step costs what it reads and not what the pool could hold.
    """

    def __init__(
        self,
        model_path: Path,
        config: ModelConfig,
        batch: int,
        pages: int,
        threads: int = 0,
        device: str = "cpu",
    ) -> None:
        self._session = _load(model_path, threads, device)
        self._binding = self._session.io_binding()
        self._logits = np.zeros((0, 0, config.vocab_size), np.float32)
        self.state: Dict[str, ort.OrtValue] = {}
        self.cache_bytes = 0
        dtypes = _state_dtypes(self._session, config, model_path)
        sizes = {"batch": batch, "pages": pages}
        for spec in state_specs(config):
            shape: List[int] = [sizes[n] if isinstance(n, str) else n for n in spec.shape]
            zeros = np.zeros(shape, dtypes[spec.name])
            value = ort.OrtValue.ortvalue_from_numpy(zeros, device, 0)
            self._binding.bind_ortvalue_input(spec.name, value)
            self._binding.bind_ortvalue_output(spec.name + "_out", value)
            self.state[spec.name] = value
            self.cache_bytes += zeros.nbytes

    def step(
        self,
        input_ids: np.ndarray,
        page_table: np.ndarray,
        past_len: np.ndarray,
        new_len: np.ndarray,
        logit_rows: np.ndarray,
    ) -> np.ndarray:
        arrays = (input_ids, page_table, past_len, new_len, logit_rows)
        for name, array in zip(STEP_INPUTS, arrays):
            self._binding.bind_cpu_input(name, array)
        if self._logits.shape[:2] != logit_rows.shape:
            self._logits = np.zeros(logit_rows.shape + self._logits.shape[2:], np.float32)
            # On the CPU the OrtValue is this array's memory; other devices copy into it.
            self._binding.bind_ortvalue_output(
                "logits", ort.OrtValue.ortvalue_from_numpy(self._logits)
            )
        self._session.run_with_iobinding(self._binding)
        return self._logits


def _load(model_path: Path, threads: int, device: str) -> ort.InferenceSession:
    provider = PROVIDERS[device]
    if provider not in ort.get_available_providers():
        raise MissingRequirement(
            "this ONNX Runtime has no %s (it has %s): install onnxruntime-gpu"
            % (provider, ", ".join(ort.get_available_providers()))
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(str(model_path), options, providers=[provider])
    except Exception as error:  # every exception of onnxruntime derives from Exception only
        raise BadInput("%s: ONNX Runtime cannot load it: %s" % (model_path, error)) from error
    if session.get_providers()[0] != provider:  # it falls back to the CPU without a word
        raise MissingRequirement(
            "ONNX Runtime could not start %s: is the driver for this GPU installed?" % provider
        )
    return session


def _state_dtypes(
    session: ort.InferenceSession, config: ModelConfig, model_path: Path
) -> Dict[str, Any]:
    """The type of every state tensor, as the graph declares it; it must be the config's state."""
    inputs = {value.name: value.type for value in session.get_inputs()}
    states = [spec.name for spec in state_specs(config)]
    if set(inputs) != set(STEP_INPUTS) | set(states):
        odd = sorted(set(inputs) ^ (set(STEP_INPUTS) | set(states)))
        raise BadInput(
            "%s: its inputs are not those of its configuration (%s): export it again"
            % (model_path, ", ".join(odd[:4]))
        )
    return {name: DTYPES[inputs[name]] for name in states}
