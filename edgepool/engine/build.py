"""`edgepool build-engine`: from a bundle to an engine that this or another machine runs.

`place` says where it is to run and what builds it, `prepare` makes what the bundle lacks for it,
`graphs` gives the graph, `builder` builds in a child process, `store` keeps the engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Type

from .. import files
from ..bundle import Bundle
from ..config import state_specs
from ..errors import BadInput, EdgepoolError, GateFailed, MissingRequirement
from ..progress import Report, silent
from . import memory, store, tensorrt_api
from .builder import OUT_OF_MEMORY, Request
from .graphs import Graph, graph_of
from .place import Place, not_here, place_for
from .prepare import Say, complete
from .profiles import Limits, profiles

KILLED = (-9, 137, OUT_OF_MEMORY)
FORMS = {
    "rtx": "tensorrt-rtx, portable bodies, no plugins",
    "tensorrt": "tensorrt, edgepool's plugins",
}


class Killed(MissingRequirement):
    """The build ended because memory ran out."""


@dataclass(frozen=True)
class Options:
    """What the user chose; the defaults are those of `edgepool build-engine`.

    precision: int8, fp16, fp32, or None for the bundle's own float type.
    """

    precision: Optional[str] = None
    target: Optional[str] = None
    runtime: str = "auto"
    batch: int = 1
    input_len: int = 512
    kv_tokens: Optional[int] = None
    workspace: Optional[int] = None
    timing_cache: Optional[Path] = None
    force: bool = False


@dataclass(frozen=True)
class Built:
    """An engine on disk. reused: it was there already, built from the same things."""

    path: Path
    record: Dict[str, Any]
    reused: bool


def build_engine(
    bundle: Bundle, options: Options, report: Report = silent, say: Say = lambda line: None
) -> Built:
    """Build the engine, or find it built already; what the bundle lacks for it is made first.

    Raises BadInput, GateFailed and MissingRequirement, the last one, too, where the bundle is ready
    for another machine. The bundle then holds what was made before; the engines are untouched.
    """
    kv_tokens = options.kv_tokens
    if kv_tokens is None:
        kv_tokens = options.batch * bundle.config.max_context
    length = min(options.input_len, bundle.config.max_context)
    limits = Limits(options.batch, length, kv_tokens)
    limits.check(bundle.config)
    place = place_for(options.target, options.runtime, list(bundle.manifest["variants"]))
    root = store.root_for(bundle)
    with store.locked(root, lambda: report("waiting for another build", 0, 1)):
        bundle = Bundle.open(bundle.path)  # another build may have added to it
        bundle.verify(report)
        precision = options.precision or str(bundle.manifest["dtype"])
        options = dataclasses.replace(options, precision=precision)
        bundle = complete(bundle, place.target, precision, place.runtime, report, say)
        graph = graph_of(bundle, place.target, precision, place.runtime)
        if place.elsewhere:
            raise not_here(bundle, place, precision)
        name = "%s-%s" % (place.name, precision)
        key = key_of(graph, place, options, limits)
        files.remove_leftovers(root / name)  # of builds that were killed
        if not options.force:
            record = store.read(root, name)
            if record is not None and store.difference(record, key) is None:
                return Built(root / name / store.ENGINE, record, reused=True)
        with store.staged(root, name, key) as staged:
            staged.facts.update(describe(bundle, place, precision, limits))
            staged.facts.update(run(graph, place, options, limits, bundle, staged.engine, report))
        return Built(root / name / store.ENGINE, staged.record, reused=False)


def key_of(graph: Graph, place: Place, options: Options, limits: Limits) -> Dict[str, Any]:
    """Everything that makes two engines different (store.KEYS)."""
    api = tensorrt_api.find(place.runtime)
    return {
        "graph": hashlib.sha256(graph.proto).hexdigest(),
        "weights": graph.weights_digest,
        "precision": options.precision,
        "profiles": dataclasses.asdict(limits),
        "workspace": options.workspace,
        "compute_capabilities": list(place.compute_capabilities),
        "runtime": api.name,
        "plugins": files.sha256(place.plugins) if place.plugins else None,
        "gpu": dataclasses.asdict(place.gpu) if place.gpu else None,
    }


def describe(bundle: Bundle, place: Place, precision: str, limits: Limits) -> Dict[str, Any]:
    """What the record tells a person. State is copied where it is not bound in place."""
    pools = pool_bytes(bundle, limits, precision)
    return {
        "target": place.target.name if place.target else None,
        "form": FORMS[place.runtime],
        "pool_bytes": pools,
        "in_place": place.runtime == "tensorrt",
        "bytes_copied_per_step": pools if place.runtime == "rtx" else 0,
    }


def pool_bytes(bundle: Bundle, limits: Limits, precision: str) -> int:
    """Bytes of all state tensors of an engine."""
    sizes = {"batch": limits.batch, "pages": limits.pages(bundle.config)}
    fp16 = "fp16" in (precision, bundle.manifest["dtype"])
    width = {"float": 2 if fp16 else 4, "float32": 4, "int8": 1}
    total = 0
    for spec in state_specs(bundle.config_of(precision)):
        count = width[spec.dtype]
        for size in spec.shape:
            count *= sizes[size] if isinstance(size, str) else size
        total += count
    return total


def run(
    graph: Graph,
    place: Place,
    options: Options,
    limits: Limits,
    bundle: Bundle,
    output: Path,
    report: Report,
) -> Dict[str, Any]:
    """Build in a child process; returns what it found out.

    TensorRT can abort, and Linux can kill what takes too much memory: neither ends this process.
    """
    workspace, precision = options.workspace, str(options.precision)
    if workspace is None and place.target is not None and place.gpu is not None:
        workspace = memory.workspace_limit(
            graph.weight_bytes,
            pool_bytes(bundle, limits, precision),
            place.target.shared_memory,
            memory.available(),
        )
    specs = [spec.name for spec in state_specs(bundle.config_of(precision))]
    with tempfile.TemporaryDirectory(prefix="edgepool-") as folder:
        proto = Path(folder) / "graph.onnx"
        proto.write_bytes(graph.proto)
        request = Request(
            runtime=place.runtime,
            precision=precision,
            graph=str(proto),
            weights=str(graph.weights_path),
            output=str(output),
            inputs=graph.inputs,
            float_nodes=graph.float_nodes,
            state=(*specs, *(name + "_out" for name in specs)),
            profiles=tuple(profiles(bundle.config, limits)),
            workspace=workspace,
            timing_cache=str(options.timing_cache) if options.timing_cache else None,
            plugin_library=str(place.plugins) if place.plugins else None,
            compute_capabilities=place.compute_capabilities,
        )
        return run_builder(request, report)


def run_builder(request: Request, report: Report) -> Dict[str, Any]:
    """`builder.build` in a process of its own."""
    child = subprocess.Popen(
        [sys.executable, "-m", "edgepool.engine.builder"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )
    assert child.stdin is not None and child.stdout is not None
    answer: Dict[str, Any] = {}
    try:
        with child.stdin as stream:
            stream.write(request.to_json())
        for line in child.stdout:
            said = json.loads(line)
            if "step" in said:
                report(*said["step"])
            else:
                answer = said
        code = child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        child.stdout.close()
    if "built" in answer and code == 0:
        return dict(answer["built"])
    raise failure(answer, code)


def failure(answer: Dict[str, Any], code: int) -> EdgepoolError:
    """The error of a child that built nothing, in one line."""
    if "error" in answer:
        kinds: List[Type[EdgepoolError]] = [GateFailed, BadInput, MissingRequirement]
        kind = next(k for k in kinds if k.exit_code == answer["error"]["code"])
        return kind(answer["error"]["message"])
    if code in KILLED:
        return Killed(
            "the build was ended, as Linux does when memory runs out: close other programs, or "
            "ask for less (--max-kv-tokens, --max-input-len, --workspace, --int8)"
        )
    return GateFailed(
        "TensorRT ended the build (%s): its messages above say why"
        % ("signal %d" % -code if code < 0 else "exit code %d" % code)
    )
