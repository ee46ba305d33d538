"""TensorRT's Python module, classic or RTX, and what differs between its versions.

Everything that depends on the version is here; `builder` asks for it by what it does.

    8.5         weak typing, precisions by flags, explicit batch by flag, no progress monitor
    10          weak or strong typing: strong is asked for
    11, RTX     strong typing only
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ..errors import BadInput, MissingRequirement
from ..progress import Report

RUNTIMES = {"tensorrt": "TensorRT", "rtx": "TensorRT-RTX"}
MODULES = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx_bindings"}
OLDEST = (8, 5)
BUILDING = "building the engine"  # a step of `report`


@dataclass(frozen=True)
class Api:
    """One installed TensorRT. version: (major, minor)."""

    runtime: str
    trt: Any
    version: Tuple[int, int]

    @property
    def name(self) -> str:
        return "%s %s" % (RUNTIMES[self.runtime], self.trt.__version__)

    @property
    def strongly_typed(self) -> bool:
        return self.runtime == "rtx" or self.version[0] >= 10


def find(runtime: str) -> Api:
    """The installed TensorRT of a kind; raises MissingRequirement where there is none."""
    try:
        trt = importlib.import_module(MODULES[runtime])
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name != MODULES[runtime]:
            raise
        raise MissingRequirement(
            "%s is not installed: %s" % (RUNTIMES[runtime], HOW_TO_INSTALL[runtime])
        ) from error
    numbers = str(trt.__version__).split(".")
    version = int(numbers[0]), int(numbers[1])
    if runtime == "tensorrt" and version < OLDEST:
        raise MissingRequirement(
            "TensorRT %s: edgepool builds with 8.5 and later; install a newer JetPack or TensorRT"
            % trt.__version__
        )
    return Api(runtime, trt, version)


HOW_TO_INSTALL = {
    "tensorrt": "on a Jetson it comes with JetPack, elsewhere: pip install 'edgepool[tensorrt]'",
    "rtx": "pip install 'edgepool[rtx]'",
}


def error_log(api: Api) -> Any:
    """A logger that prints errors on stderr and keeps them in `errors`; the rest is dropped."""
    severity = api.trt.ILogger.Severity

    # Which module `trt` is, is known when the program runs, not when its types are checked.
    class Log(api.trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            api.trt.ILogger.__init__(self)
            self.errors: List[str] = []

        def log(self, level: Any, message: str) -> None:
            if level in (severity.INTERNAL_ERROR, severity.ERROR):
                self.errors.append(message)
                sys.stderr.write(message + "\n")

    return Log()


def create_network(api: Api, builder: Any) -> Any:
    """An empty network, strongly typed where the version can."""
    flags = api.trt.NetworkDefinitionCreationFlag
    bits = 0
    if api.runtime == "tensorrt" and api.version[0] < 10:
        bits |= 1 << int(flags.EXPLICIT_BATCH)
    elif api.strongly_typed and api.version[0] == 10 and api.runtime == "tensorrt":
        bits |= 1 << int(flags.STRONGLY_TYPED)
    return builder.create_network(bits)


def set_precision(api: Api, config: Any, precision: str) -> None:
    """Where typing is weak: which precisions TensorRT may choose. Strong typing reads the graph."""
    if api.strongly_typed:
        return
    flag = api.trt.BuilderFlag
    if precision in ("fp16", "int8"):
        config.set_flag(flag.FP16)
    if precision == "int8":
        config.set_flag(flag.INT8)
    config.set_flag(flag.OBEY_PRECISION_CONSTRAINTS)


def pin_state(api: Api, network: Any, names: Tuple[str, ...]) -> None:
    """Where typing is weak: state tensors keep their own type and the plain layout.

    INT8 state is no quantised activation, its scales are tensors of their own; TensorRT wants a
    range for it all the same, and +-127 makes its scale 1.
    """
    if api.strongly_typed:
        return
    linear = 1 << int(api.trt.TensorFormat.LINEAR)
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    tensors += [network.get_output(i) for i in range(network.num_outputs)]
    for tensor in tensors:
        if tensor.name in names:
            tensor.allowed_formats = linear
            if tensor.dtype == api.trt.int8:
                tensor.dynamic_range = (-127.0, 127.0)


def pin_floats(api: Api, network: Any, names: Tuple[str, ...]) -> None:
    """Where typing is weak: the layers of these nodes compute in FP32, whatever the flags allow.

    The parser gives layers the names of their nodes. Without this the squares of a norm, and what
    FP16 cannot hold, may be computed in FP16.
    """
    if api.strongly_typed:
        return
    wanted = set(names)
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        if layer.name in wanted:
            layer.precision = api.trt.float32
            for i in range(layer.num_outputs):
                layer.set_output_type(i, api.trt.float32)


def set_workspace(api: Api, config: Any, limit: Optional[int]) -> None:
    if limit is not None:
        config.set_memory_pool_limit(api.trt.MemoryPoolType.WORKSPACE, limit)


def compute_capabilities(api: Api, wanted: Tuple[int, ...]) -> List[Any]:
    """TensorRT-RTX's values for the GPUs to build for, 89 for compute capability 8.9.

    Raises BadInput for one that this version cannot build for.
    """
    known = {
        int(name[2:]): value
        for name, value in api.trt.ComputeCapability.__members__.items()
        if name.startswith("SM")
    }
    for sm in wanted:
        if sm not in known:
            raise BadInput(
                "%s has no compute capability %d.%d (it has %s): build with --runtime tensorrt on "
                "a machine with that GPU"
                % (api.name, sm // 10, sm % 10, ", ".join("%d.%d" % divmod(s, 10) for s in known))
            )
    return [known[sm] for sm in wanted]


def set_compute_capabilities(api: Api, config: Any, wanted: Tuple[int, ...]) -> None:
    """TensorRT-RTX: the GPUs to build for; none: its default ones."""
    values = compute_capabilities(api, wanted)
    if values:
        config.num_compute_capabilities = len(values)
        for i, value in enumerate(values):
            config.set_compute_capability(value, i)


def load_plugins(api: Api, library: Path) -> None:
    """Register the plugins of a library; raises MissingRequirement for one that does not load."""
    registry = api.trt.get_plugin_registry()
    why = "%s refuses it" % api.name
    try:
        if hasattr(registry, "load_library"):
            loaded = registry.load_library(str(library))
        else:  # 8.5: the library registers its creators as it is loaded
            loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        loaded, why = None, str(error)
    if loaded is None:
        raise MissingRequirement(
            "%s: cannot be loaded: %s: run `edgepool build-plugins` again" % (library, why)
        )


def watch_progress(api: Api, config: Any, report: Report) -> None:
    """Report how far the outermost phase is, where the version tells of it."""
    base = getattr(api.trt, "IProgressMonitor", None)
    if base is None or not hasattr(config, "progress_monitor"):
        return

    # As for `Log`: the base class is looked up in the module that is installed.
    class Monitor(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.outermost: Dict[str, int] = {}

        def phase_start(self, name: str, parent: Optional[str], steps: int) -> None:
            if parent is None:
                self.outermost[name] = steps

        def step_complete(self, name: str, step: int) -> bool:
            if name in self.outermost:
                report(BUILDING, min(step, self.outermost[name] - 1), self.outermost[name])
            return True

        def phase_finish(self, name: str) -> None:
            self.outermost.pop(name, None)

    config.progress_monitor = Monitor()
