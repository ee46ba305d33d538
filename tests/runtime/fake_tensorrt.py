"""TensorRT, imitated at its Python interface: engines are ONNX graphs that ONNX Runtime runs.

Of versions 8.5 and 10, with what each has and has not. Every call is checked: tensors that are not
bound, shapes outside of the profile, steps without their shapes, memory that a context was not
given, objects that are used after what they came from is gone. `tests/runtime/test_trt_session.py`
holds the parameters of every method to those of TensorRT-RTX's bindings.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import numpy as np
import onnx
import onnxruntime as ort

from edgepool import files
from edgepool.engine.profiles import Profile, shape_of

from .fake_cuda import Gpu

SCRATCH = 1000  # bytes of memory that a context needs
MAGIC = b"imitated engine "
Shapes = dict[str, list[tuple[int, ...]]]  # input: least, optimal, most


class DataType(enum.Enum):
    FLOAT, HALF, INT8, INT32 = range(4)


NUMPY = {
    DataType.FLOAT: np.float32,
    DataType.HALF: np.float16,
    DataType.INT8: np.int8,
    DataType.INT32: np.int32,
}
TYPES = dict(zip(("tensor(float)", "tensor(float16)", "tensor(int8)", "tensor(int32)"), DataType))


def serialized(graph: bytes, version: str, profiles: list[Shapes]) -> bytes:
    """An engine file."""
    header = {"version": version, "profiles": profiles}
    return MAGIC + json.dumps(header).encode() + b"\n" + graph


def profile_shapes(graph: bytes, profiles: list[Profile]) -> list[Shapes]:
    """What the builder would be told of an ONNX graph's inputs."""
    inputs = onnx.ModelProto.FromString(graph).graph.input
    dims = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in inputs
    }
    return [{n: [shape_of(d, p, i) for i in range(3)] for n, d in dims.items()} for p in profiles]


# ---------------------------------------------------------------------------------- execution


class OldContext:
    """IExecutionContext of 8.5, whose memory is a property."""

    def __init__(self, engine: OldEngine, managed: bool) -> None:
        self._engine = weakref.ref(engine)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._profile: int | None = None
        self._scratch = 0 if managed else SCRATCH

    def _live(self) -> OldEngine:
        engine = self._engine()
        assert engine is not None, "the engine is gone"
        engine.check()
        return engine

    @property
    def device_memory(self) -> None:
        raise AssertionError("it is set, not read")

    @device_memory.setter
    def device_memory(self, memory: int) -> None:
        self._scratch = self._live().gpu.memory[memory].nbytes

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        engine = self._live()
        assert stream_handle in engine.gpu.streams
        self._profile = profile_index
        return profile_index < len(engine.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None
        low, _, high = self._live().get_tensor_profile_shape(name, self._profile)
        self._shapes[name] = tuple(shape)
        return all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        engine = self._live()
        assert memory in engine.gpu.memory
        self._addresses[name] = memory
        return name in engine.dtypes

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine = self._live()
        assert self._scratch >= SCRATCH
        if set(self._addresses) != set(engine.dtypes) or set(self._shapes) != set(engine.inputs):
            return False
        for name in engine.outputs:
            if name != "logits":
                same = self._addresses[name] == self._addresses[name[: -len("_out")]]
                assert same == engine.in_place
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        engine.gpu.submit(stream_handle, lambda: run(engine, shapes, addresses))
        return True


class IExecutionContext(OldContext):
    """That of 10.3."""

    device_memory = None  # type: ignore[assignment]

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size <= self._live().gpu.memory[memory].nbytes
        self._scratch = size


def run(engine: OldEngine, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
    """One step, on what the memory holds when its turn comes."""

    def view(name: str, shape: tuple[int, ...]) -> np.ndarray:
        dtype = np.dtype(NUMPY[engine.dtypes[name]])
        count = int(np.prod(shape)) * dtype.itemsize
        return engine.gpu.memory[addresses[name]][:count].view(dtype).reshape(shape)

    feeds = {name: view(name, shapes[name]).copy() for name in engine.inputs}
    results = engine.session.run(engine.outputs, feeds)
    for name, value in zip(engine.outputs, results, strict=True):
        view(name, value.shape)[...] = value


class OldEngine:
    """ICudaEngine of 8.5."""

    device_memory_size = SCRATCH

    def __init__(self, graph: bytes, profiles: list[Shapes], module: Any, runtime: Any) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(graph, options, ["CPUExecutionProvider"])
        self.gpu, self.in_place = module.gpu, module.in_place
        self.gpu.users.add(self)
        self.profiles = profiles
        self._runtime = weakref.ref(runtime)
        self.inputs = {v.name: v.shape for v in self.session.get_inputs()}
        self.outputs = [v.name for v in self.session.get_outputs()]
        values = (*self.session.get_inputs(), *self.session.get_outputs())
        self.dtypes = {v.name: TYPES[v.type] for v in values}
        self.num_io_tensors = len(self.dtypes)
        self.num_optimization_profiles = len(profiles)

    def check(self) -> None:
        runtime = self._runtime()
        assert runtime is not None, "the runtime is gone"
        runtime.check()

    def get_tensor_name(self, index: int) -> str:
        self.check()
        return list(self.dtypes)[index]

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.dtypes[name]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self.profiles[profile_index][name]]

    def create_execution_context_without_device_memory(self) -> OldContext:
        self.check()
        return OldContext(self, True)


class ICudaEngine(OldEngine):
    """That of 10.3."""

    device_memory_size_v2 = SCRATCH
    device_memory_size = create_execution_context_without_device_memory = None  # type: ignore

    def create_execution_context(self, strategy: Any) -> IExecutionContext:
        self.check()
        return IExecutionContext(self, strategy is Strategy.USER_MANAGED)


Strategy = enum.Enum("Strategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED")


# ----------------------------------------------------------------------------------- building


class IOptimizationProfile:
    def __init__(self) -> None:
        self.shapes: Shapes = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        assert all(a <= b <= c for a, b, c in zip(min, opt, max, strict=True))
        self.shapes[input] = [tuple(min), tuple(opt), tuple(max)]


class IBuilderConfig:
    def __init__(self) -> None:
        self.flags: list[str] = []
        self.workspace: int | None = None
        self.profiles: list[IOptimizationProfile] = []
        self.progress_monitor: Any = None

    def set_flag(self, flag: Any) -> None:
        self.flags.append(flag.name)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        assert pool_size > 0
        self.workspace = pool_size

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Any:
        return SimpleNamespace(serialize=lambda: serialized_timing_cache + b"timed")

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        return not ignore_mismatch


class Network:
    """INetworkDefinition: the parsed graph with its weights."""

    def __init__(self, flags: int) -> None:
        self.flags, self.model = flags, onnx.ModelProto()

    def _tensors(self, values: Any) -> list[Any]:
        return [SimpleNamespace(name=v.name, dtype=None) for v in values]

    @property
    def num_inputs(self) -> int:
        return len(self.model.graph.input)

    @property
    def num_outputs(self) -> int:
        return len(self.model.graph.output)

    @property
    def num_layers(self) -> int:
        return len(self.model.graph.node)

    def get_input(self, index: int) -> Any:
        return self._tensors(self.model.graph.input)[index]

    def get_output(self, index: int) -> Any:
        return self._tensors(self.model.graph.output)[index]

    def get_layer(self, index: int) -> Any:
        return SimpleNamespace(
            name=self.model.graph.node[index].name,
            num_outputs=1,
            get_output=lambda i: SimpleNamespace(dtype="FLOAT"),
            set_output_type=lambda i, dtype: None,
        )


class OnnxParser:
    def __init__(self, network: Network, logger: Any) -> None:
        self._network, self.num_errors = network, 0

    def parse(self, model: bytes, path: str) -> bool:
        proto = onnx.ModelProto.FromString(model)
        folder = str(Path(path).parent)
        for tensor in proto.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                onnx.external_data_helper.load_external_data_for_tensor(tensor, folder)
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
        self._network.model = proto
        return True

    def get_error(self, index: int) -> Any:
        raise AssertionError


def compiled(model: onnx.ModelProto) -> bytes:
    """The graph with the bodies of its operators, kept in the folder IMITATED_COMPILED if it is
    named: making it takes PyTorch, whose import takes seconds."""
    name = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    path = Path(os.environ.get("IMITATED_COMPILED", "/nonexistent")) / name
    if path.exists():
        return path.read_bytes()
    from edgepool.exporter import lower

    graph = bytes(lower.runnable(model).SerializeToString())
    if path.parent.is_dir():
        with files.new_file(path) as stream:
            stream.write(graph)
    return graph


def flags(*names: str) -> Any:
    return enum.IntEnum("Flags", names, start=0)


def imitation(gpu: Gpu, version: str, in_place: bool = True, seconds: float = 0.0) -> Any:
    """The module. in_place: whether its engines update state in place; seconds: a build's length.

    Reads IMITATED_FAILURE: what goes wrong in a build (`none`: no engine, `abort`, `kill`).
    """
    new = int(version.split(".")[0]) >= 10
    severity = enum.Enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE", start=0)

    class ILogger:
        Severity = severity

        def __init__(self) -> None:
            pass

    class Logger(ILogger):
        WARNING = severity.WARNING

        def __init__(self, min_severity: Any) -> None:
            super().__init__()

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self._logger = weakref.ref(logger)

        def check(self) -> None:
            assert self._logger() is not None, "the logger is gone"

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> OldEngine | None:
            if not serialized_engine.startswith(MAGIC):
                return None
            header, graph = serialized_engine[len(MAGIC) :].split(b"\n", 1)
            engine = json.loads(header)
            if engine["version"] != version:
                return None
            kind = ICudaEngine if new else OldEngine
            return kind(graph, engine["profiles"], module, self)

    class Builder:
        def __init__(self, logger: Any) -> None:
            self._logger = logger

        def create_network(self, flags: int) -> Network:
            assert flags == (2 if new else 1)  # strong typing, or explicit batch
            return Network(flags)

        def create_builder_config(self) -> IBuilderConfig:
            config = IBuilderConfig()
            if not new:
                del config.progress_monitor
            return config

        def create_optimization_profile(self) -> IOptimizationProfile:
            return IOptimizationProfile()

        def build_serialized_network(self, network: Network, config: IBuilderConfig) -> Any:
            return build(network, config, self._logger)

    def build(network: Network, config: IBuilderConfig, logger: Any) -> bytes | None:
        assert registered, "the plugin library was not loaded"
        failure = os.environ.get("IMITATED_FAILURE", "")
        if failure == "none":
            logger.log(severity.ERROR, "no implementation for node 7")
            return None
        if failure == "abort":
            os.abort()
        if failure == "kill":
            os.kill(os.getpid(), 9)
        monitor = getattr(config, "progress_monitor", None)
        for i in range(10):
            time.sleep(seconds / 10)
            if monitor is not None:
                monitor.phase_start("Building", None, 10) if i == 0 else None
                monitor.step_complete("Building", i)
        shapes = {n: p.shapes for n, p in enumerate(config.profiles)}
        graph = compiled(network.model)
        dims = {v.name: v.type.tensor_type.shape.dim for v in network.model.graph.input}
        for profile in shapes.values():
            for name, sizes in dims.items():
                fixed = tuple(d.dim_value for d in sizes)
                profile.setdefault(name, [fixed] * 3)
        return serialized(graph, version, list(shapes.values()))

    registered: list[str] = []
    registry = SimpleNamespace()
    if new:
        registry.load_library = lambda plugin_path: registered.append(plugin_path) or object()
    else:
        registered.append("by ctypes")

    module = SimpleNamespace(
        __version__=version, __name__="tensorrt", gpu=gpu, in_place=in_place,
        ILogger=ILogger, Logger=Logger, Runtime=Runtime, Builder=Builder, OnnxParser=OnnxParser,
        NetworkDefinitionCreationFlag=flags("EXPLICIT_BATCH", "STRONGLY_TYPED"),
        BuilderFlag=flags("FP16", "INT8", "OBEY_PRECISION_CONSTRAINTS"),
        TensorFormat=flags("LINEAR"), MemoryPoolType=flags("WORKSPACE"),
        get_plugin_registry=lambda: registry, registered=registered,
        float32=DataType.FLOAT, float16=DataType.HALF, int8=DataType.INT8, int32=DataType.INT32,
    )  # fmt: skip
    if new:
        module.ExecutionContextAllocationStrategy = Strategy
        module.IProgressMonitor = type("IProgressMonitor", (), {})
    return module


Imitation = Callable[..., Any]
