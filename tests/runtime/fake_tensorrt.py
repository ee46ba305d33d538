"""TensorRT and a GPU, imitated at the boundary: engines are ONNX graphs that ONNX Runtime runs.

Device memory is host memory, and everything queued on the stream happens at `synchronize` or not at
all, so that a buffer that is reused too early, an address that is not bound, a shape outside the
profile or a step without its own shapes shows up as wrong logits or as a refusal.
"""

from __future__ import annotations

import ctypes
import enum
import types
from typing import Any, Callable

import numpy as np
import onnxruntime as ort

from edgepool.engine.profiles import Profile, shape_of

DTYPES = {"tensor(float)": np.float32, "tensor(int8)": np.int8, "tensor(int32)": np.int32}


class FakeDevice:
    """`device_memory.Device`; graphs: whether it records them."""

    stream = 77

    def __init__(self, graphs: bool = True) -> None:
        self._graphs = graphs
        self.memory: dict[int, np.ndarray] = {}
        self.queue: list[Callable[[], None]] = []
        self.launches = 0
        self.closed = False

    def allocate(self, nbytes: int) -> int:
        array = np.zeros(max(1, nbytes), np.uint8)
        self.memory[array.ctypes.data] = array
        return array.ctypes.data

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def to_device(self, address: int, array: np.ndarray) -> None:
        assert array.nbytes <= self.memory[address].nbytes
        self.queue.append(lambda: ctypes.memmove(address, array.ctypes.data, array.nbytes))

    def to_host(self, array: np.ndarray, address: int) -> None:
        assert array.nbytes <= self.memory[address].nbytes
        self.queue.append(lambda: ctypes.memmove(array.ctypes.data, address, array.nbytes))

    def synchronize(self) -> None:
        queued, self.queue = self.queue, []
        for operation in queued:
            operation()

    def capture(self, work: Callable[[], None]) -> Callable[[], None] | None:
        if not self._graphs:
            return None
        before, self.queue = self.queue, []
        work()
        recorded, self.queue = self.queue, before

        def launch() -> None:
            self.launches += 1
            self.queue += recorded

        return launch

    def close(self) -> None:
        self.closed = True


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._profile: int | None = None

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == self._engine.device.stream
        self._profile = profile_index
        return profile_index < len(self._engine.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        self._shapes[name] = tuple(shape)
        return all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory in self._engine.device.memory
        self._addresses[name] = memory
        return name in self._engine.dtypes

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine = self._engine
        assert stream_handle == engine.device.stream
        if set(self._addresses) != set(engine.dtypes) or set(self._shapes) != set(engine.inputs):
            return False
        for name in engine.outputs:
            if name != "logits" and not engine.in_place:
                assert self._addresses[name] != self._addresses[name[: -len("_out")]]
        engine.device.queue.append(
            lambda s=dict(self._shapes), a=dict(self._addresses): run(engine, s, a)
        )
        return True


def run(engine: FakeEngine, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
    """One step, on what the memory holds when its turn comes."""

    def view(name: str, shape: tuple[int, ...]) -> np.ndarray:
        dtype = np.dtype(engine.dtypes[name])
        memory = engine.device.memory[addresses[name]]
        count = int(np.prod(shape)) * dtype.itemsize
        return memory[:count].view(dtype).reshape(shape)

    feeds = {name: view(name, shapes[name]).copy() for name in engine.inputs}
    results = engine.session.run(engine.outputs, feeds)
    for name, value in zip(engine.outputs, results, strict=True):
        view(name, value.shape)[...] = value


class FakeEngine:
    def __init__(
        self, graph: bytes, device: FakeDevice, profiles: list[Profile], in_place: bool
    ) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(graph, options, ["CPUExecutionProvider"])
        self.device, self.profiles, self.in_place = device, profiles, in_place
        self.inputs = {v.name: v.shape for v in self.session.get_inputs()}
        self.outputs = [v.name for v in self.session.get_outputs()]
        values = (*self.session.get_inputs(), *self.session.get_outputs())
        self.dtypes = {v.name: DTYPES[v.type] for v in values}
        self.num_io_tensors = len(self.dtypes)
        self.num_optimization_profiles = len(profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self.dtypes)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return self.dtypes[name]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        profile = self.profiles[profile_index]
        return [shape_of(self.inputs[name], profile, i) for i in range(3)]

    def create_execution_context(self) -> FakeContext:
        return FakeContext(self)


def fake_tensorrt(device: FakeDevice, profiles: list[Profile], in_place: bool) -> Any:
    """The module; its engines are serialised as ONNX."""

    class Runtime:
        def __init__(self, logger: Any) -> None:
            pass

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> FakeEngine | None:
            if not serialized_engine:
                return None
            return FakeEngine(serialized_engine, device, profiles, in_place)

    class Logger:
        WARNING = enum.Enum("Severity", "WARNING").WARNING

        def __init__(self, min_severity: Any) -> None:
            pass

    module = types.ModuleType("tensorrt")
    module.Logger, module.Runtime = Logger, Runtime  # type: ignore[attr-defined]
    module.nptype = lambda dtype: dtype  # type: ignore[attr-defined]
    return module
