"""`edgepool build-engine`: from a bundle to an engine that this or another machine runs.

What is built depends on where it is to run:

    no --target, a GPU here           TensorRT, plugins, for this GPU
    no --target, no GPU               TensorRT-RTX, ahead of time, for its default GPUs
    --target of this machine          TensorRT, plugins
    --target of another machine       nothing: its variant is made and checked, then what to type
    --runtime rtx                     TensorRT-RTX for the target's compute capability

What the bundle lacks for it is made first (`prepare`).
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
from typing import Any, Dict, List, Optional, Tuple, Type

from .. import files
from ..bundle import Bundle
from ..config import state_specs
from ..errors import BadInput, EdgepoolError, GateFailed, MissingRequirement
from ..progress import Report, silent
from ..targets import Target, find_target, load_targets
from . import gpu, memory, store, tensorrt_api
from .builder import OUT_OF_MEMORY, Request
from .graphs import Graph, flag, graph_name, graph_of
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


@dataclass(frozen=True)
class Place:
    """Where an engine is to run, and what builds it. elsewhere: it cannot be built here."""

    name: str
    runtime: str
    target: Optional[Target]
    elsewhere: bool = False
    compute_capabilities: Tuple[int, ...] = ()
    gpu: Optional[gpu.Gpu] = None
    plugins: Optional[Path] = None


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
    place = place_for(options)
    root = store.root_for(bundle)
    with store.locked(root, lambda: report("waiting for another build", 0, 1)):
        bundle = Bundle.open(bundle.path)  # another build may have added to it
        report("verifying the bundle", 0, 1)
        bundle.verify()
        report("verifying the bundle", 1, 1)
        precision = options.precision or str(bundle.manifest["dtype"])
        options = dataclasses.replace(options, precision=precision)
        bundle = complete(bundle, place.target, precision, place.runtime, report, say)
        graph = graph_of(bundle, place.target, precision, place.runtime)
        if place.elsewhere:
            raise not_here(bundle, place, precision)
        name = "%s-%s" % (place.name, precision)
        key = key_of(graph, place, options, limits)
        if not options.force:
            record = store.read(root, name)
            if record is not None and store.difference(record, key) is None:
                return Built(root / name / store.ENGINE, record, reused=True)
        with store.staged(root, name, key) as staged:
            staged.facts.update(describe(bundle, place, precision, limits))
            staged.facts.update(run(graph, place, options, limits, bundle, staged.engine, report))
        return Built(root / name / store.ENGINE, staged.record, reused=False)


def place_for(options: Options) -> Place:
    """Where to build for. Raises BadInput and MissingRequirement for what nothing can build."""
    here = gpu.find()
    if options.runtime not in ("auto", *tensorrt_api.RUNTIMES):
        raise BadInput("runtime '%s': choose auto, tensorrt or rtx" % options.runtime)
    if options.target is None:
        if options.runtime == "rtx" or (options.runtime == "auto" and here is None):
            return ahead_of_time("rtx", None, (here.sm,) if here else ())
        if here is None:
            raise MissingRequirement(
                "no GPU here, and TensorRT builds for the GPU it runs on: "
                "`--runtime rtx` builds without one"
            )
        target = target_of(here)
        return Place(target.name, "tensorrt", target, gpu=here, plugins=plugin_library())
    target = find_target(options.target)
    if target.sm is None:
        raise BadInput(
            "%s needs no engine: ONNX Runtime runs the bundle (`edgepool run`)" % target.name
        )
    ahead = "tensorrt_rtx" in target.software
    if options.runtime == "rtx" or (options.runtime == "auto" and ahead):
        return ahead_of_time("%s-rtx" % target.name, target, (target.sm,))
    if here is not None and here.sm == target.sm:
        return Place(target.name, "tensorrt", target, gpu=here, plugins=plugin_library())
    return Place(target.name, "tensorrt", target, elsewhere=True)


def ahead_of_time(name: str, target: Optional[Target], capabilities: Tuple[int, ...]) -> Place:
    """TensorRT-RTX for these compute capabilities; raises BadInput for one that it lacks."""
    tensorrt_api.compute_capabilities(tensorrt_api.find("rtx"), capabilities)
    return Place(name, "rtx", target, compute_capabilities=capabilities)


def target_of(here: gpu.Gpu) -> Target:
    """The profile of this machine's GPU."""
    for target in load_targets().values():
        if target.sm == here.sm:
            return target
    raise MissingRequirement(
        "%s (compute capability %d.%d) is no target yet: `--runtime rtx` may build for it"
        % (here.name, here.sm // 10, here.sm % 10)
    )


def not_here(bundle: Bundle, place: Place, precision: str) -> MissingRequirement:
    """What to type on the target, whose graph is ready."""
    here, target = gpu.find(), place.target
    assert target is not None
    return MissingRequirement(
        "%s is complete and checked, but its engine can only be built on the %s "
        "(here: %s): copy the bundle there and run `edgepool build-engine %s%s --target %s`"
        % (
            (bundle.path / graph_name(bundle, target, precision, place.runtime)).parent,
            target.title,
            here.name if here else "no GPU",
            bundle.path.name,
            flag(bundle, precision),
            target.name,
        )
    )


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
    halves = "fp16" in (precision, bundle.manifest["dtype"])
    width = {"float": 2 if halves else 4, "float32": 4, "int8": 1}
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


def plugin_library() -> Path:
    """The installed plugin library; raises MissingRequirement where there is none."""
    from ..plugin_library import installed

    library = installed()
    if library is None:
        raise MissingRequirement("no plugin library is built: `edgepool build-plugins` makes one")
    return library
