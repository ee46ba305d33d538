"""A session on ONNX Runtime: the state stays where it is, bound as input and output."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import onnxruntime as ort

from ..config import STEP_INPUTS, ModelConfig, StateSpec, state_specs
from ..errors import BadInput, EdgepoolError, MissingRequirement, out_of_memory
from ..onnxfile import NUMPY_TYPES
from .session import Session, physical_pages

TYPES = {  # of a StateSpec: what the graph may declare
    "float": ("tensor(float)", "tensor(float16)"),
    "float32": ("tensor(float)",),
    "int8": ("tensor(int8)",),
    "int32": ("tensor(int32)",),
}
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
        self._path = model_path
        self._session = _load(model_path, threads, device)
        self._binding = self._session.io_binding()
        self._logits = np.zeros((0, 0, config.vocab_size), np.float32)
        self.state: Dict[str, ort.OrtValue] = {}
        self.cache_bytes = 0
        dtypes = _check_graph(self._session, config, model_path)
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
        read: bool = True,
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
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # see `_load`
            raise _failure(self._path, "cannot run it", error) from error
        return self._logits

    def close(self) -> None:
        self.state.clear()
        del self._binding, self._session


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
    # Without VNNI, the fastest kernels for INT8 saturate; this keeps the exact ones.
    options.add_session_config_entry("session.x64quantprecision", "1")
    try:
        session = ort.InferenceSession(str(model_path), options, providers=[provider])
    except Exception as error:  # every exception of onnxruntime derives from Exception only
        raise _failure(model_path, "cannot load it", error) from error
    if session.get_providers()[0] != provider:  # it falls back to the CPU without a word
        raise MissingRequirement(
            "ONNX Runtime could not start %s: is the driver for this GPU installed?" % provider
        )
    _give_back()
    return session


def _give_back() -> None:
    """Return to the system what loading has freed. glibc keeps it: 100 MB and more of SmolLM2."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libcs have none
        if trim is not None:
            trim(0)


def _failure(model_path: Path, what: str, error: Exception) -> EdgepoolError:
    """One line about an exception of ONNX Runtime, whose messages can be long and of many lines."""
    if out_of_memory(error):
        return MissingRequirement(
            "%s: out of memory: take a shorter prompt or fewer new tokens, or close other programs"
            % model_path
        )
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:297] + "..."
    return BadInput("%s: ONNX Runtime %s: %s" % (model_path, what, text))


def _check_graph(
    session: ort.InferenceSession, config: ModelConfig, model_path: Path
) -> Dict[str, Any]:
    """The numpy type of every state tensor, as the graph declares it.

    Raises BadInput unless inputs and outputs are those that the configuration implies: a state of
    another shape would be found in the middle of a run, or not at all.
    """
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = {value.name: value for value in session.get_outputs()}
    specs = state_specs(config)
    wanted = set(STEP_INPUTS) | {spec.name for spec in specs}
    missing = {"logits"} | {spec.name + "_out" for spec in specs}
    odd = sorted((set(inputs) ^ wanted) | (missing - set(outputs)))
    if odd:
        raise BadInput(
            "%s: its inputs and outputs are not those of its configuration (%s): export it again"
            % (model_path, ", ".join(odd[:4]))
        )
    expected = [StateSpec(n, ("batch", "n")[: _rank(n)], "int32") for n in STEP_INPUTS] + specs
    ends = [StateSpec(spec.name + "_out", spec.shape, spec.dtype) for spec in specs]
    logits = StateSpec("logits", ("batch", "rows", config.vocab_size), "float32")
    for values, each in ((inputs, expected), (outputs, [*ends, logits])):
        for spec in each:
            value = values[spec.name]
            if not (_fits(value.shape, spec.shape) and value.type in TYPES[spec.dtype]):
                raise BadInput(
                    "%s: '%s' is %s %s, its configuration says %s %s: export it again"
                    % (model_path, spec.name, value.type, value.shape, spec.dtype, list(spec.shape))
                )
    return {spec.name: NUMPY_TYPES[inputs[spec.name].type] for spec in specs}


def _rank(step_input: str) -> int:
    return 1 if step_input in ("past_len", "new_len") else 2


def _fits(shape: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether a graph's shape has every fixed size of `expected` and leaves the others open."""
    return len(shape) == len(expected) and all(
        mine == size if isinstance(size, int) else not isinstance(mine, int)
        for mine, size in zip(shape, expected)
    )
