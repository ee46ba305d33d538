"""What a board needs of a bundle and of this edgepool, as members of a package.

    bundle/          a bundle for one target; two graphs of the same weights share them
    wheel/           this edgepool, with plugin sources, target profiles and container files
    plugins/         a plugin library for the image build, if one is given
    docker-args      the target's arguments for `docker build`
    Dockerfile.jetson, .dockerignore, jetson/

With the last three, the extracted folder is the context of a `docker build`.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from .. import __version__
from ..bundle import GRAPHS, MANIFEST, MODEL, Bundle, manifest_bytes
from ..docker_args import build_args, command_line
from ..engine.graphs import graph_name
from ..engine.prepare import CALIBRATION, Say, complete
from ..errors import BadInput
from ..plugin_library import NAME as PLUGIN_LIBRARY
from ..plugin_library import build_record
from ..progress import Report, silent
from ..resources import resource
from ..targets import Target
from .listing import Listing
from .shared import shared_graph
from .wheel import write_wheel
from .write import measure, write

CONTAINER = (".dockerignore", "Dockerfile.jetson", "jetson")
DOCKER_ARGS = "docker-args"
RUNTIME = "tensorrt"
# What is said of a package's size: part, and how the names of its members begin.
PARTS = (
    ("weights and graphs", ("bundle/model", "bundle/variants/")),
    ("tokenizer", ("bundle/tokenizer",)),
    ("reference outputs, records", ("bundle/",)),
    ("edgepool (wheel)", ("wheel/",)),
    ("plugin library", ("plugins/",)),
    ("container", ("",)),
)


def package(
    bundle: Bundle,
    target: Target,
    output: Path,
    plugin_library: Optional[Path] = None,
    report: Report = silent,
    say: Say = lambda line: None,
) -> Listing:
    """Write the package of a bundle for a board; returns its list.

    The bundle gets the target's graphs first, where it lacks them: in its own float type, and in
    those other precisions that it has for ONNX Runtime. Raises BadInput for a target that is no
    board, a damaged bundle, and a plugin library for another machine; and what `prepare` raises.
    """
    if target.kind != "jetson":
        raise BadInput(
            "%s is no Jetson: copy the bundle there, or write a model repository with --triton"
            % target.name
        )
    if plugin_library is not None:
        check_library(plugin_library, target)
    for precision in precisions_of(bundle, target):
        bundle = complete(bundle, target, precision, RUNTIME, report, say)
    with tempfile.TemporaryDirectory(prefix="edgepool-") as folder:
        sources = members(bundle, target, plugin_library, Path(folder))
        listing = Listing(
            __version__,
            target.name,
            bundle.manifest["source_digest"],
            measure(sources, report),
        )
        check_bundle(bundle, listing, sources)
        write(output, listing, sources, report)
    return listing


def members(
    bundle: Bundle, target: Target, plugin_library: Optional[Path], made: Path
) -> Dict[str, Path]:
    """The files of the package by name; what is made for it is in the folder `made`."""
    sources = {"bundle/" + name: path for name, path in files_of(bundle, target, made).items()}
    wheel = write_wheel(made)
    sources["wheel/" + wheel.name] = wheel
    for name in CONTAINER:
        top = resource(name)
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file():
                sources[path.relative_to(top.parent).as_posix()] = path
    arguments = build_args(target)
    if plugin_library is not None:
        sources["plugins/" + PLUGIN_LIBRARY] = plugin_library
        arguments["PLUGINS"] = "plugins/" + PLUGIN_LIBRARY
    sources[DOCKER_ARGS] = made / DOCKER_ARGS
    sources[DOCKER_ARGS].write_text(command_line(arguments) + "\n", encoding="ascii")
    return sources


def precisions_of(bundle: Bundle, target: Target) -> List[str]:
    """The bundle's own float type, then the others that it has a graph in, the target's or not."""
    own, files = str(bundle.manifest["dtype"]), bundle.manifest["files"]
    found = [own]
    for precision in ("fp16", "int8"):
        names = GRAPHS[precision], graph_name(bundle, target, precision, RUNTIME)
        if precision != own and any(name in files for name in names):
            found.append(precision)
    return found


def files_of(bundle: Bundle, target: Target, made: Path) -> Dict[str, Path]:
    """The files of the package's bundle: the bundle's own for one target, and a new manifest.

    The portable graph, which ONNX Runtime runs, takes its weights from the variant's files where
    they are the same.
    """
    manifest = bundle.manifest
    graphs = [graph_name(bundle, target, p, RUNTIME) for p in precisions_of(bundle, target)]
    quantization = manifest["quantization"]
    if quantization is not None:
        int8 = quantization["variants"][target.name]
        quantization = {**quantization, "model": int8, "variants": {target.name: int8}}
    graph = shared_graph(bundle.model_path, bundle.variant_path(target.name), graphs[0])
    if graph is None:
        graphs.append(MODEL)
    names = [name for each in graphs for name in bundle.graph_files(each)]
    kept = ("tokenizer.json", CALIBRATION, manifest["reference"])
    names += [name for name in kept if name in manifest["files"]]
    files = {name: bundle.file(name) for name in names}
    records = {name: manifest["files"][name] for name in names}
    if graph is not None:
        files[MODEL] = made / MODEL
        files[MODEL].write_bytes(graph)
        digest = hashlib.sha256(graph).hexdigest()
        records[MODEL] = {"sha256": digest, "bytes": len(graph)}
    files[MANIFEST] = made / MANIFEST
    parity = manifest["parity"] or {}
    changed = {
        **manifest,
        "parity": {name: parity[name] for name in parity if name in files} or None,
        "variants": {target.name: manifest["variants"][target.name]},
        "quantization": quantization,
    }
    files[MANIFEST].write_bytes(manifest_bytes(changed, records))
    return files


def check_bundle(bundle: Bundle, listing: Listing, sources: Dict[str, Path]) -> None:
    """Raise BadInput for a file of the bundle that is not what its manifest says."""
    for member in listing.members:
        name = member.name[len("bundle/") :]
        if member.name.startswith("bundle/") and sources[member.name] == bundle.path / name:
            bundle.check_digest(name, member.sha256)


def check_library(path: Path, target: Target) -> None:
    """Raise BadInput for a plugin library that the image build would refuse."""
    record, tensorrt = build_record(path), target.software["tensorrt"]
    for wrong, why in (
        (record["emulated"], "it runs on the CPU, for tests"),
        (record["version"] != __version__, "it is of edgepool %s" % record["version"]),
        (record["machine"] != "aarch64", "it is for %s, a Jetson is aarch64" % record["machine"]),
        (target.sm not in record["sm"], "it has no code for sm_%s" % target.sm),
        (
            record["tensorrt"].split(".")[:2] != tensorrt.split(".")[:2],
            "it is for TensorRT %s, the target has %s" % (record["tensorrt"], tensorrt),
        ),
    ):
        if wrong:
            raise BadInput("%s: not for %s: %s" % (path, target.name, why))


def parts(listing: Listing) -> List[Tuple[str, int, int]]:
    """Part, files and bytes of what is in a package; a member belongs to the first that fits."""
    totals = {part: [0, 0] for part, _ in PARTS}
    for member in listing.members:
        part = next(part for part, begins in PARTS if member.name.startswith(begins))
        totals[part][0] += 1
        totals[part][1] += member.bytes
    return [(part, count, size) for part, (count, size) in totals.items() if count]
