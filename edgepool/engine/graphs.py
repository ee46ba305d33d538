"""Which graph of a bundle an engine is built from, ready to be parsed.

TensorRT with plugins takes a variant as it is. TensorRT-RTX takes the portable graph with the
bodies that have no If: those build in a third of the time, and to a smaller engine.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ..bundle import GRAPHS, MODEL, Bundle
from ..errors import BadInput, GateFailed
from ..onnxfile import skeleton
from ..targets import Target, find_target
from . import preflight
from .preflight.graph import Scope, Value
from .preflight.read import read_model

BODIES = "mask"
EXACT = re.compile(r"((.*[._])?norm|rotation)/")  # nodes of norms, and of the angles of positions
RTX_READER = "rtx-4090"  # whose rules hold for every engine of TensorRT-RTX


@dataclass(frozen=True)
class Graph:
    """A graph without its weights, which are external data in the folder of weights_path.

    float_nodes: those that compute in FP32 also where TensorRT may choose (8.5).
    """

    proto: bytes
    weights_path: Path
    weights_digest: str
    weight_bytes: int
    inputs: Dict[str, List[Any]]
    float_nodes: Tuple[str, ...]


def graph_of(bundle: Bundle, target: Optional[Target], precision: str, runtime: str) -> Graph:
    """The graph for a runtime, which preflight finds ready.

    Raises BadInput where the bundle has none of that precision, GateFailed where it is not ready.
    """
    name = source(bundle, target, precision, runtime)
    path = bundle.file(name)
    reads_it = target if target is not None and runtime == "tensorrt" else find_target(RTX_READER)
    require_ready(path, reads_it)
    proto = skeleton(str(path))
    scope = read_model(path).scopes[0]
    inputs = {value.name: list(value.dims or ()) for value in scope.inputs}
    if runtime == "rtx":
        proto = with_bodies(proto)
    size = sum(record["bytes"] for record in records_of(bundle, name))
    digest = weights_digest(bundle, name)
    return Graph(proto, path, digest, size, inputs, float_nodes(scope, precision))


def float_nodes(scope: Scope, precision: str) -> Tuple[str, ...]:
    """Nodes that stay FP32: what an FP16 graph declares so, and norms and angles of INT8."""
    if precision == "fp16":
        return tuple(
            node.name
            for node in scope.nodes
            if any(scope.declared.get(x, Value("")).dtype == "FLOAT" for x in node.outputs)
        )
    return tuple(
        node.name for node in scope.nodes if precision == "int8" and EXACT.match(node.name)
    )


def records_of(bundle: Bundle, name: str) -> List[Dict[str, Any]]:
    """The manifest's records of a graph and of the files that it takes weights from."""
    return [bundle.manifest["files"][used] for used in bundle.graph_files(name)]


def weights_digest(bundle: Bundle, name: str) -> str:
    """A digest of a graph of a bundle with all its weights."""
    sums = "".join(record["sha256"] for record in records_of(bundle, name))
    return hashlib.sha256(sums.encode("ascii")).hexdigest()


def require_ready(path: Path, target: Target) -> None:
    """Raise GateFailed for a graph that the target's TensorRT would refuse or misread."""
    report = preflight.check(path, target)
    errors = [finding for finding in report.findings if finding.severity == preflight.ERROR]
    if errors:
        raise GateFailed(
            "%s: not ready for %s: %s in %s (%s): `edgepool check %s --target %s` shows all %d"
            % (
                path,
                report.reader,
                errors[0].title,
                errors[0].where,
                errors[0].rule,
                shlex.quote(str(path)),
                target.name,
                len(errors),
            )
        )


def graph_name(bundle: Bundle, target: Optional[Target], precision: str, runtime: str) -> str:
    """The ONNX file to start from, as the manifest names it; it may not be there yet."""
    name = MODEL if precision == bundle.manifest["dtype"] else GRAPHS[precision]
    plugins = runtime == "tensorrt" and target is not None
    return "variants/%s/%s" % (target.name, name) if plugins and target else name


def source(bundle: Bundle, target: Optional[Target], precision: str, runtime: str) -> str:
    """The same name; raises BadInput where the bundle lacks the file."""
    name = graph_name(bundle, target, precision, runtime)
    if name not in bundle.manifest["files"]:
        raise BadInput("%s: it has no %s any more: build the engine again" % (bundle.path, name))
    return name


def flag(bundle: Bundle, precision: str) -> str:
    """The option of `edgepool build-engine` for a precision, with a space before it."""
    return "" if precision == bundle.manifest["dtype"] else " --%s" % precision


def with_bodies(proto: bytes) -> bytes:
    """The graph with the bodies for TensorRT-RTX in place of those it has."""
    import onnx

    from ..ops.attach import attach_functions
    from ..ops.registry import DOMAIN
    from ..quantize.embedding import for_tensorrt

    model = onnx.ModelProto.FromString(proto)
    for_tensorrt(model)
    names = {function.name for function in model.functions}
    del model.functions[:]
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type in names:
            node.op_type = re.sub(r"_\d+$", "", node.op_type)
    attach_functions(model, BODIES)
    return bytes(model.SerializeToString(deterministic=True))
