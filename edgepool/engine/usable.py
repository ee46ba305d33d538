"""The engine of a bundle that this machine can run, checked before anything of it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from .. import files
from ..bundle import ENGINES, Bundle
from ..errors import BadInput, GateFailed, MissingRequirement
from ..plugin_library import installed
from ..targets import find_target
from . import gpu, store, tensorrt_api
from .graphs import source, weights_digest

BY_SPEED = ("int8", "fp16", "fp32")


@dataclass(frozen=True)
class Usable:
    """A serialised engine, the TensorRT for it, its record, and its name (`rtx-int8`)."""

    engine: bytes
    api: tensorrt_api.Api
    record: Dict[str, Any]
    name: str


def find_usable(bundle: Bundle, trusted: bool = False) -> Usable:
    """The fastest engine that was built from this bundle, for this machine.

    trusted: also one that was not built by this user. Raises MissingRequirement without a GPU or
    TensorRT, BadInput where there is no engine, GateFailed that says why none of them fits.
    """
    here = gpu.find()
    if here is None:
        raise MissingRequirement(
            "no GPU here to run an engine on: `--backend ort` runs the bundle on the CPU"
        )
    candidates = engines(bundle)
    if not candidates:
        raise BadInput("%s: no engine yet: `edgepool build-engine` makes one" % bundle.path)
    refused = []
    for root, name, record in candidates:
        key = key_here(bundle, here, record)
        reason = store.difference(record, key)
        if reason is None:
            api = tensorrt_api.find(runtime_of(record))
            if key["plugins"]:
                library = installed()
                tensorrt_api.load_plugins(api, Path(str(library)))
            return Usable(store.load(root, name, key, trusted), api, record, name)
        refused.append("%s: %s" % (root / name / store.ENGINE, reason))
    raise GateFailed("%s: run `edgepool build-engine` again" % refused[0])


def engines(bundle: Bundle) -> List[Tuple[Path, str, Dict[str, Any]]]:
    """Root, name and record of every engine of a bundle, the fastest precision first."""
    found = []
    for root in (bundle.path / ENGINES, store.cached_root(bundle)):
        for path in sorted(root.glob("*/" + store.RECORD)):
            record = store.read(root, path.parent.name)
            if record is not None and record["key"].get("precision") in BY_SPEED:
                found.append((root, path.parent.name, record))
    return sorted(found, key=lambda one: BY_SPEED.index(one[2]["key"]["precision"]))


def key_here(bundle: Bundle, here: gpu.Gpu, record: Dict[str, Any]) -> Dict[str, Any]:
    """What the key of a record would be if it were built here and now."""
    key = dict(record["key"])
    runtime = runtime_of(record)
    target = find_target(str(record["target"])) if record["target"] is not None else None
    key["weights"] = weights_digest(bundle, source(bundle, target, key["precision"], runtime))
    key["runtime"] = tensorrt_api.find(runtime).name
    if runtime == "tensorrt":
        key["gpu"] = vars(here)
        library: Optional[Path] = installed()
        key["plugins"] = files.sha256(library) if library else None
    elif key["compute_capabilities"] and here.sm not in key["compute_capabilities"]:
        key["compute_capabilities"] = [here.sm]
    return key


def runtime_of(record: Dict[str, Any]) -> str:
    return "rtx" if str(record["key"].get("runtime")).startswith("TensorRT-RTX") else "tensorrt"
