"""A graph becomes a serialised engine. Runs in a child process of `edgepool build-engine`.

    python -m edgepool.engine.builder < request.json

The request is a `Request` as JSON. Lines on stdout are JSON: {"step": [name, done, total]} as it
goes, and {"built": {...}} or {"error": {"code", "message"}} at the end. TensorRT's own words go to
stderr. TensorRT ends the process on some faults, and Linux does when memory runs out; the parent
then says so in one line.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ..errors import BadInput, EdgepoolError, GateFailed, MissingRequirement, out_of_memory
from ..progress import Report
from . import tensorrt_api
from .profiles import Profile, shape_of
from .tensorrt_api import Api

OUT_OF_MEMORY = 12  # exit code: what was asked for was refused, and Linux killed nothing
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Request:
    """What to build.

    graph         ONNX file; weights: the file whose folder its external data is in
    inputs        dims of every graph input by name; dynamic axes are names
    state         names of the state inputs and outputs
    float_nodes   nodes that compute in FP32 also where typing is weak
    output        the file to write
    compute_capabilities   TensorRT-RTX only; empty: its default
    """

    runtime: str
    precision: str
    graph: str
    weights: str
    output: str
    inputs: Dict[str, List[Any]]
    state: Tuple[str, ...]
    float_nodes: Tuple[str, ...]
    profiles: Tuple[Profile, ...]
    workspace: Optional[int] = None
    timing_cache: Optional[str] = None
    plugin_library: Optional[str] = None
    compute_capabilities: Tuple[int, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        data: Dict[str, Any] = json.loads(text)
        data["profiles"] = tuple(Profile(**profile) for profile in data["profiles"])
        for name in ("state", "float_nodes", "compute_capabilities"):
            data[name] = tuple(data[name])
        return cls(**data)


def build(request: Request, report: Report) -> Dict[str, Any]:
    """Build and write the engine; returns what the parent records.

    Raises BadInput for a graph that the parser refuses, GateFailed when no engine comes of it.
    """
    api = tensorrt_api.find(request.runtime)
    trt = api.trt
    logger = tensorrt_api.error_log(api)
    try:
        builder = trt.Builder(logger)
    except TypeError as error:  # what its bindings make of a null pointer
        raise MissingRequirement(
            "%s could not start: is there a GPU and its driver?" % api.name
        ) from error
    if request.plugin_library:
        tensorrt_api.load_plugins(api, Path(request.plugin_library))
    report("parsing the graph", 0, 1)
    network = parse(api, builder, logger, request)
    report("parsing the graph", 1, 1)
    config = builder.create_builder_config()
    tensorrt_api.set_precision(api, config, request.precision)
    tensorrt_api.pin_state(api, network, request.state)
    tensorrt_api.pin_floats(api, network, request.float_nodes)
    tensorrt_api.set_workspace(api, config, request.workspace)
    if request.runtime == "rtx":
        tensorrt_api.set_compute_capabilities(api, config, request.compute_capabilities)
    tensorrt_api.watch_progress(api, config, report)
    add_profiles(builder, config, request)
    cache = open_timing_cache(config, request.timing_cache)
    report(tensorrt_api.BUILDING, 0, 1)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        reason = logger.errors[0] if logger.errors else "it gave no reason"
        raise GateFailed("%s built no engine: %s" % (api.name, reason))
    report(tensorrt_api.BUILDING, 1, 1)
    write(Path(request.output), memoryview(engine))
    if cache is not None:
        save_timing_cache(cache, Path(str(request.timing_cache)))
    types = layer_types(api, network)
    return {"runtime": api.name, "layers": network.num_layers, "layer_types": types}


def parse(api: Api, builder: Any, logger: Any, request: Request) -> Any:
    network = tensorrt_api.create_network(api, builder)
    parser = api.trt.OnnxParser(network, logger)
    graph = Path(request.graph).read_bytes()
    # The path is where it looks for external data.
    parsed = parser.parse(graph, request.weights)
    if not parsed or parser.num_errors:
        error = parser.get_error(0) if parser.num_errors else None
        raise BadInput(
            "%s cannot parse the graph: %s" % (api.name, error.desc() if error else "no reason")
        )
    return network


def add_profiles(builder: Any, config: Any, request: Request) -> None:
    for profile in request.profiles:
        bounds = builder.create_optimization_profile()
        for name, dims in request.inputs.items():
            if any(isinstance(d, str) for d in dims):
                bounds.set_shape(name, *(shape_of(dims, profile, i) for i in range(3)))
        config.add_optimization_profile(bounds)


def open_timing_cache(config: Any, path: Optional[str]) -> Any:
    if path is None:
        return None
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        raise BadInput("--timing-cache %s: name a file in a folder that exists" % file)
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    config.set_timing_cache(cache, False)
    return cache


def save_timing_cache(cache: Any, path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    write(temporary, memoryview(cache.serialize()))
    temporary.replace(path)


def write(path: Path, data: memoryview) -> None:
    """Write a file; raises BadInput where the disk does not take it."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise BadInput(
            "%s: cannot be written: %s: free some space, or write elsewhere"
            % (path, str(error.strerror).lower())
        ) from error


def layer_types(api: Api, network: Any) -> Dict[str, int]:
    """How many layers of the parsed network give outputs of each type."""
    counts: Dict[str, int] = {}
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.num_outputs:
            name = str(layer.get_output(0).dtype).split(".")[-1].lower()
            counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def main() -> int:
    die_with_parent()
    channel = sys.stdout

    def say(**line: Any) -> None:
        print(json.dumps(line), file=channel, flush=True)

    try:
        request = Request.from_json(sys.stdin.read())
        say(built=build(request, lambda *step: say(step=step)))
        return 0
    except EdgepoolError as failure:
        say(error={"code": failure.exit_code, "message": str(failure)})
        return failure.exit_code
    except Exception as failure:
        if not out_of_memory(failure):
            raise
        return OUT_OF_MEMORY


def die_with_parent() -> None:
    """End when the parent is killed, so that no build goes on that nobody waits for."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
