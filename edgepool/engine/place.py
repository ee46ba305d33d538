"""Where an engine is to run, and what builds it.

no --target, a GPU here           TensorRT, plugins, for this GPU
no --target, no GPU               TensorRT-RTX, ahead of time, for its default GPUs
--target of this machine          TensorRT, plugins
--target of another machine       nothing: its variant is made and checked, then what to type
--runtime rtx                     TensorRT-RTX for the target's compute capability
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from .. import plugin_library
from ..bundle import Bundle
from ..errors import BadInput, MissingRequirement
from ..targets import Target, find_target, load_targets
from . import gpu, tensorrt_api
from .graphs import flag, graph_name
from .tensorrt_api import Api


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


def place_for(wanted: Optional[str], runtime: str, variants: Sequence[str] = ()) -> Place:
    """The place for a target (None: this machine) and a runtime.

    variants: the targets that the bundle has graphs for, which are preferred where several stand
    for this machine. Raises BadInput and MissingRequirement for what cannot be built anywhere, and
    where TensorRT or the plugins here are not those of the target.
    """
    here = gpu.find()
    if runtime not in ("auto", *tensorrt_api.RUNTIMES):
        raise BadInput("runtime '%s': choose auto, tensorrt or rtx" % runtime)
    if wanted is None:
        if runtime == "rtx" or (runtime == "auto" and here is None):
            return _ahead_of_time("rtx", None, (here.sm,) if here else ())
        if here is None:
            raise MissingRequirement(
                "no GPU here, and TensorRT builds for the GPU it runs on: "
                "`--runtime rtx` builds without one"
            )
        return _on(here, None, variants)
    target = find_target(wanted)
    if target.sm is None:
        raise BadInput(
            "%s needs no engine: ONNX Runtime runs the bundle (`edgepool run`)" % target.name
        )
    ahead = "tensorrt_rtx" in target.software
    if runtime == "rtx" or (runtime == "auto" and ahead):
        return _ahead_of_time("%s-rtx" % target.name, target, (target.sm,))
    if "tensorrt" not in target.software:
        raise BadInput(
            "%s is built for by TensorRT-RTX: leave out --runtime tensorrt" % target.name
        )
    if here is not None and here.sm == target.sm:
        return _on(here, target, variants)
    return Place(target.name, "tensorrt", target, elsewhere=True)


def _ahead_of_time(name: str, target: Optional[Target], capabilities: Tuple[int, ...]) -> Place:
    """TensorRT-RTX for these compute capabilities; raises BadInput for one that it lacks."""
    tensorrt_api.compute_capabilities(tensorrt_api.find("rtx"), capabilities)
    return Place(name, "rtx", target, compute_capabilities=capabilities)


def _on(here: gpu.Gpu, target: Optional[Target], variants: Sequence[str]) -> Place:
    """The GPU of this machine, with TensorRT and its plugins."""
    api = tensorrt_api.find("tensorrt")
    target = target_here(here, api, target, variants)
    library = _plugins(here, api)
    return Place(target.name, "tensorrt", target, gpu=here, plugins=library)


def target_here(
    here: gpu.Gpu, api: Api, wanted: Optional[Target], variants: Sequence[str]
) -> Target:
    """The target that this machine is: its GPU's, with the TensorRT that is installed.

    Of several (an Orin's JetPacks) one that the bundle has, then the newest that is not newer than
    the TensorRT. wanted: this one, or MissingRequirement where it has another major version.
    """
    known = [t for t in load_targets().values() if t.sm == here.sm and "tensorrt" in t.software]
    if not known:
        raise MissingRequirement(
            "%s (compute capability %d.%d) is no target yet: `--runtime rtx` may build for it"
            % (here.name, here.sm // 10, here.sm % 10)
        )
    fitting = [t for t in known if _reads(api.version[0], _version(t)[0])]
    if wanted is not None and wanted in fitting:
        return wanted
    if wanted is not None or not fitting:
        asked = wanted or known[0]
        names = ", ".join(t.name for t in fitting)
        raise MissingRequirement(
            "%s is for TensorRT %s, and here is %s: %s"
            % (
                asked.name,
                asked.software["tensorrt"],
                api.name,
                "choose --target %s" % names if names else "install that one (`edgepool doctor`)",
            )
        )
    return max(fitting, key=lambda t: (t.name in variants, _version(t) <= api.version, _version(t)))


def _reads(installed: int, meant: int) -> bool:
    """Whether a major version of TensorRT takes the graphs that are meant for another.

    Those for 8 have another opset, another form of INT8, and plugins of another interface.
    """
    return installed == meant or installed > meant > 8


def _version(target: Target) -> Tuple[int, int]:
    major, minor = target.software["tensorrt"].split(".")[:2]
    return int(major), int(minor)


def _plugins(here: gpu.Gpu, api: Api) -> Path:
    """The installed plugin library; raises MissingRequirement for none, or one for others."""
    library = plugin_library.installed()
    if library is None:
        raise MissingRequirement("no plugin library is built: `edgepool build-plugins` makes one")
    record = plugin_library.build_record(library)
    faults: List[str] = []
    if int(record["tensorrt"].split(".")[0]) != api.version[0]:
        faults.append("it is for TensorRT %s, and here is %s" % (record["tensorrt"], api.name))
    if here.sm not in record["sm"] and not any(ptx <= here.sm for ptx in record["ptx"]):
        faults.append("it has no code for %s (sm_%d)" % (here.name, here.sm))
    if faults:
        raise MissingRequirement(
            "%s: %s: `edgepool build-plugins` makes another" % (library, faults[0])
        )
    return library


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
            shlex.quote(bundle.path.resolve().name),
            flag(bundle, precision),
            target.name,
        )
    )
