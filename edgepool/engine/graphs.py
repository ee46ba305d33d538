"""Which graph of a bundle an engine is built from, ready to be parsed.

TensorRT with plugins takes a variant as it is. TensorRT-RTX takes the portable graph with the
bodies that have no If: those build in a third of the time, and to a smaller engine.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from ..bundle import Bundle
from ..errors import BadInput, GateFailed
from ..onnxfile import external_locations, skeleton
from ..targets import Target, find_target
from . import preflight

BODIES = "mask"
RTX_READER = "rtx-4090"  # whose rules hold for every engine of TensorRT-RTX


@dataclass(frozen=True)
class Graph:
    """A graph without its weights, which are external data in the folder of weights_path."""

    proto: bytes
    weights_path: Path
    weights_digest: str
    weight_bytes: int
    inputs: Dict[str, List[Any]]


def graph_of(bundle: Bundle, target: Optional[Target], precision: str, runtime: str) -> Graph:
    """The graph for a runtime, which preflight finds ready.

    Raises BadInput where the bundle has none of that precision, GateFailed where it is not ready.
    """
    path = source(bundle, target, precision, runtime)
    reads_it = target if target is not None and runtime == "tensorrt" else find_target(RTX_READER)
    require_ready(path, reads_it)
    proto = skeleton(str(path))
    inputs = input_dims(proto)
    if runtime == "rtx":
        proto = with_bodies(proto)
    size = sum(record["bytes"] for record in files_of(bundle, path))
    digest = weights_digest(bundle, path)
    return Graph(proto, path, digest, size, inputs)


def files_of(bundle: Bundle, path: Path) -> List[Dict[str, Any]]:
    """The manifest's records of a graph and of the files that it takes weights from."""
    used = [path, *(path.parent / name for name in sorted(external_locations(str(path))))]
    names = [str(file.relative_to(bundle.path)).replace("\\", "/") for file in used]
    return [bundle.manifest["files"][name] for name in names]


def weights_digest(bundle: Bundle, path: Path) -> str:
    """A digest of a graph file of a bundle with all its weights."""
    sums = "".join(record["sha256"] for record in files_of(bundle, path))
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
                path,
                target.name,
                len(errors),
            )
        )


def source(bundle: Bundle, target: Optional[Target], precision: str, runtime: str) -> Path:
    """The ONNX file to start from."""
    if precision == "fp16" and bundle.manifest["dtype"] != "fp16":
        raise BadInput(
            "%s: it is an fp32 bundle: export it with `edgepool export --dtype fp16`" % bundle.path
        )
    name = "model.int8.onnx" if precision == "int8" else "model.onnx"
    if runtime == "tensorrt" and target is not None:
        bundle.variant_path(target.name)
        name = "variants/%s/%s" % (target.name, name)
    if name not in bundle.manifest["files"]:
        raise BadInput("%s: it has no %s: run `edgepool quantize` first" % (bundle.path, name))
    return bundle.file(name)


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


def input_dims(proto: bytes) -> Dict[str, List[Any]]:
    """Dims of every input: numbers, and names of dynamic axes."""
    import onnx

    graph = onnx.ModelProto.FromString(proto).graph
    return {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in graph.input
    }
