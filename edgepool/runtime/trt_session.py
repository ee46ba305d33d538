"""A session on a TensorRT engine, classic (8.5 to 11) or RTX.

The state stays on the GPU. Where the engine updates it in place, every state tensor is one buffer,
bound as input and as output; where that is not proved (TensorRT-RTX), there are two, and they
change places after each step.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ..config import STEP_INPUTS, ModelConfig, state_specs
from ..errors import BadInput, GateFailed, MissingRequirement
from .cuda_graph import Graph
from .device_memory import Device
from .session import Session, physical_pages

DECODE, PREFILL = 0, 1  # the engine's optimisation profiles
TABLE_COLUMNS = 64  # decode pads the page table to a multiple of this, so that a graph lives long
MOST_GRAPHS = 8  # the latest shapes: contexts grow, so that old ones seldom come back


def open_session(
    engine: bytes,
    trt: Any,
    device: Device,
    config: ModelConfig,
    in_place: bool,
    capacity: Optional[int] = None,
) -> Session:
    """A session over a serialised engine, which the caller has found trustworthy.

    trt        the TensorRT module that built it; its plugins are registered already
    in_place   whether the engine updates its state in place
    capacity   tokens per sequence; by default all that the engine has room for
    Raises BadInput for an engine that is not one of this model, or has no room for the capacity;
    the device is closed then.
    """
    backend = TrtBackend(engine, trt, device, config, in_place)
    room = (backend.pages - 1) // backend.batch * config.page_size
    room = min(room, backend.columns * config.page_size, config.max_context)
    capacity = room if capacity is None else capacity
    if physical_pages(config, backend.batch, capacity) > backend.pages or capacity > room:
        backend.close()
        raise BadInput(
            "the engine has room for %d tokens per sequence, not %d: build it with more "
            "--max-kv-tokens" % (room, capacity)
        )
    return Session(config, backend, backend.batch, capacity, backend.length)


class TrtBackend:
    """Runs steps of an engine (`session.Backend`).

    batch, pages, columns and length are the largest step it was built for: sequences, physical
    pages, columns of the page table, new tokens per sequence.
    """

    def __init__(
        self, engine: bytes, trt: Any, device: Device, config: ModelConfig, in_place: bool
    ) -> None:
        self._device = device
        self._contexts: List[Any] = []
        self._buffers: Dict[str, Buffer] = {}
        self._state: Dict[str, List[int]] = {}
        self._graphs: "OrderedDict[Tuple[int, ...], Optional[Graph]]" = OrderedDict()
        self._copies, self._turn = (1 if in_place else 2), 0
        try:
            self._open(engine, trt, config)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold on to the engine
            self.close()
            raise

    def _open(self, engine: bytes, trt: Any, config: ModelConfig) -> None:
        device = self._device
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)  # both have to outlive the engine
        self._engine = self._runtime.deserialize_cuda_engine(engine)
        if self._engine is None:
            raise GateFailed("%s cannot load the engine: build it again" % trt.__name__)
        check_tensors(self._engine, config)
        most = {n: tuple(self._most(n)) for n in (*STEP_INPUTS, *state_names(config))}
        self.batch, self.length = most["input_ids"]
        self.columns = most["page_table"][1]
        self.pages = pages_of(config, most)
        self._vocab = config.vocab_size
        scratch = scratch_bytes(self._engine)
        address = device.allocate(scratch)
        self._contexts = [self._context(trt, i, address, scratch) for i in (DECODE, PREFILL)]
        self._buffers = {n: Buffer(device, most[n], np.int32) for n in STEP_INPUTS}
        rows = most["logit_rows"][1]
        self._buffers["logits"] = Buffer(device, (self.batch, rows, self._vocab), np.float32)
        self.cache_bytes = 0
        for name in state_names(config):
            nbytes = item_bytes(trt, self._engine.get_tensor_dtype(name))
            nbytes *= int(np.prod(most[name], dtype=np.int64))
            self._state[name] = [device.allocate(nbytes) for _ in range(self._copies)]
            self.cache_bytes += nbytes * self._copies
        self._bind()

    def step(
        self,
        input_ids: np.ndarray,
        page_table: np.ndarray,
        past_len: np.ndarray,
        new_len: np.ndarray,
        logit_rows: np.ndarray,
        read: bool = True,
    ) -> np.ndarray:
        single = input_ids.shape[1] == 1
        if single:
            page_table = padded(page_table, self.columns)
        arrays = dict(zip(STEP_INPUTS, (input_ids, page_table, past_len, new_len, logit_rows)))
        context = self._contexts[DECODE if single else PREFILL]
        for name, array in arrays.items():
            self._buffers[name].write(array)
        rows = logit_rows.shape[1]
        key = (*page_table.shape, rows, self._turn)
        graph = self._graphs.get(key) if single else None
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.launch()
        else:
            for name, array in arrays.items():
                self._must(context.set_input_shape(name, array.shape), "take the shape", name)
            if not self._run(context):
                raise MissingRequirement(
                    "TensorRT could not run a step: its messages above say why"
                )
            if single and key not in self._graphs:
                # The first run of a shape may still set things up; the next can be recorded.
                self._keep(key, self._device.capture(lambda: self._run(context)))
        shape = (self.batch, rows, self._vocab)
        logits = self._buffers["logits"].read(shape) if read else np.empty(shape, np.float32)
        self._device.synchronize()
        if self._copies > 1:
            self._turn = 1 - self._turn
            self._bind()
        return logits

    def close(self) -> None:
        """Give the GPU's memory back. The session cannot be used afterwards.

        What TensorRT has goes before its runtime, and all of it before the CUDA context.
        """
        self._device.synchronize()
        for graph in self._graphs.values():
            if graph is not None:
                graph.close()
        self._graphs.clear()
        self._contexts.clear()
        self._engine = self._runtime = None
        self._buffers.clear()
        self._device.close()

    def _run(self, context: Any) -> bool:
        return bool(context.execute_async_v3(self._device.stream))

    def _keep(self, key: Tuple[int, ...], graph: Optional[Graph]) -> None:
        """Keep a graph, or that there can be none, in place of the one used longest ago."""
        self._graphs[key] = graph
        if len(self._graphs) > MOST_GRAPHS:
            _, old = self._graphs.popitem(last=False)
            if old is not None:
                old.close()

    def _bind(self) -> None:
        """Tell both contexts where everything is."""
        for context in self._contexts:
            for name, buffer in self._buffers.items():
                self._must(context.set_tensor_address(name, buffer.address), "bind", name)
            for name, copies in self._state.items():
                out = copies[(self._turn + 1) % len(copies)]
                self._must(context.set_tensor_address(name, copies[self._turn]), "bind", name)
                self._must(context.set_tensor_address(name + "_out", out), "bind", name + "_out")

    def _context(self, trt: Any, profile: int, scratch: int, nbytes: int) -> Any:
        """A context on memory that it shares with the other one: they run in turn."""
        context = create_context(trt, self._engine)
        if context is None:
            raise MissingRequirement(
                "the GPU has too little memory to run the engine: close other programs, or build "
                "it for fewer --max-kv-tokens"
            )
        if hasattr(context, "set_device_memory"):
            context.set_device_memory(scratch, nbytes)
        else:
            context.device_memory = scratch
        if not context.set_optimization_profile_async(profile, self._device.stream):
            raise GateFailed("the engine has no profile %d: build it again" % profile)
        for name in state_names_of(self._engine):
            self._must(context.set_input_shape(name, self._most(name)), "take the shape", name)
        return context

    def _most(self, name: str) -> Sequence[int]:
        return tuple(self._engine.get_tensor_profile_shape(name, PREFILL)[2])

    def _must(self, done: bool, what: str, name: str) -> None:
        if not done:
            raise BadInput("the engine does not %s of '%s': build it again" % (what, name))


def create_context(trt: Any, engine: Any) -> Any:
    """An execution context that is given its memory: by a strategy, which 8.5 has not."""
    if hasattr(trt, "ExecutionContextAllocationStrategy"):
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        return engine.create_execution_context(strategy)
    return engine.create_execution_context_without_device_memory()


def scratch_bytes(engine: Any) -> int:
    """Bytes that a context needs for any profile."""
    if hasattr(engine, "device_memory_size_v2"):
        return int(engine.device_memory_size_v2)
    return int(engine.device_memory_size)


def item_bytes(trt: Any, dtype: Any) -> int:
    """Bytes of one element. `trt.nptype` of 8.5 fails with NumPy 1.24, which has no np.bool."""
    sizes = {trt.float32: 4, trt.float16: 2, trt.int32: 4, trt.int8: 1}
    if dtype not in sizes:
        raise BadInput("the engine has state of type %s: build it again" % dtype)
    return sizes[dtype]


class Buffer:
    """An input or output of every step: memory of the largest size, on the GPU and pinned."""

    def __init__(self, device: Device, shape: Sequence[int], dtype: Any) -> None:
        self._device = device
        self._host = device.pinned((int(np.prod(shape)),), dtype)
        self.address = device.allocate(self._host.nbytes)

    def write(self, array: np.ndarray) -> None:
        """Copy an array to the GPU; it may be changed as soon as this returns."""
        part = self._host[: array.size]
        part[:] = array.reshape(-1)
        self._device.to_device(self.address, part)

    def read(self, shape: Tuple[int, ...]) -> np.ndarray:
        """The array on the GPU; there after the next `synchronize`, until the next `read`."""
        part = self._host[: int(np.prod(shape))]
        self._device.to_host(part, self.address)
        return part.reshape(shape)


def padded(page_table: np.ndarray, columns: int) -> np.ndarray:
    """The table with columns of 0, which stand for no page, up to a multiple of TABLE_COLUMNS."""
    width = min(columns, -(-page_table.shape[1] // TABLE_COLUMNS) * TABLE_COLUMNS)
    return np.pad(page_table, ((0, 0), (0, width - page_table.shape[1])))


def state_names(config: ModelConfig) -> List[str]:
    return [spec.name for spec in state_specs(config)]


def state_names_of(engine: Any) -> List[str]:
    """Names of an engine's state inputs: those with an output of the same name and `_out`."""
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    return [name for name in names if name + "_out" in names]


def pages_of(config: ModelConfig, most: Dict[str, Tuple[int, ...]]) -> int:
    for spec in state_specs(config):
        if "pages" in spec.shape:
            return most[spec.name][spec.shape.index("pages")]
    raise BadInput("a model without KV pages has no TensorRT session")


def check_tensors(engine: Any, config: ModelConfig) -> None:
    """Raise BadInput unless an engine's inputs and outputs are those of the configuration."""
    found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
    names = state_names(config)
    wanted = {*STEP_INPUTS, "logits", *names, *(name + "_out" for name in names)}
    if found != wanted:
        odd = ", ".join(sorted(found ^ wanted)[:4])
        raise BadInput("the engine is not one of this model (%s): build it again" % odd)
    if engine.num_optimization_profiles != 2:
        raise BadInput("the engine has not the profiles that edgepool builds: build it again")
