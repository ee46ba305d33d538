"""Target profiles: what is known about each machine that a bundle is made for.

One TOML file per target in export/targets/, the target's name is the file's. Whatever a stage has
to know about a target is in its profile; nothing else has a list of targets.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from .config import suggest
from .errors import BadInput
from .resources import resource

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS = ("jetson", "datacenter", "workstation", "cpu")
FUNCTIONS = ("none", "auto", "mask", "gather")


@dataclass(frozen=True)
class PowerMode:
    """A mode of nvpmodel, with what is left of the GPU's figures in it where that is known."""

    id: int
    name: str
    bandwidth_gb_s: Optional[float] = None
    fp16_tflops: Optional[float] = None
    int8_tops: Optional[float] = None


@dataclass(frozen=True)
class Image:
    """What the container of a target is made from.

    base           image that compiles; runtime: the one that runs, or the same
    python, cuda, tensorrt  their versions in both; cuda and tensorrt None without a GPU
    sm             compute capabilities that the plugin library has code for
    requirements   jetson/requirements-NAME.txt: the Python packages
    """

    base: str
    runtime: str
    python: str
    cuda: Optional[str]
    tensorrt: Optional[str]
    sm: Tuple[int, ...]
    requirements: str


@dataclass(frozen=True)
class Target:
    """One profile.

    sm             compute capability, 72 for 7.2; None without a GPU
    memory_gib     sizes it is sold with; shared_memory: the CPU uses the same
    fp16_tflops, int8_tops  of its tensor cores, dense
    software       version by name: os, python, cuda, cudnn, tensorrt, tensorrt_rtx, onnxruntime
    functions      bodies its graph carries: `none` (plugins), or a form of ops.attach
    operators      list of what its parser knows, in export/operators/; None: every operator
    top_k          the largest K of TopK; tensor_elements: the most elements of a tensor
    """

    name: str
    title: str
    kind: str
    gpu: Optional[str]
    sm: Optional[int]
    memory_gib: Tuple[int, ...]
    bandwidth_gb_s: Optional[float]
    software: Mapping[str, str]
    precisions: Tuple[str, ...]
    recommended_precision: str
    opset: int
    ir_version: int
    functions: str
    operators: Optional[str] = None
    top_k: Optional[int] = None
    tensor_elements: Optional[int] = None
    power_modes: Tuple[PowerMode, ...] = field(default=())
    fp16_tflops: Optional[float] = None
    int8_tops: Optional[float] = None
    image: Optional[Image] = None

    @property
    def shared_memory(self) -> bool:
        """Whether CPU and GPU share one memory."""
        return self.kind in ("jetson", "cpu")

    @property
    def runs_plugins(self) -> bool:
        """Whether the edgepool operators are TensorRT plugins there."""
        return self.functions == "none"

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON types."""
        record = dict(vars(self))
        record["software"] = dict(self.software)
        record["memory_gib"] = list(self.memory_gib)
        record["precisions"] = list(self.precisions)
        modes = (vars(mode).items() for mode in self.power_modes)
        record["power_modes"] = [{k: v for k, v in mode if v is not None} for mode in modes]
        record["image"] = {**vars(self.image), "sm": list(self.image.sm)} if self.image else None
        return record


def load_targets() -> Dict[str, Target]:
    """Every profile by name; boards first, then by memory bandwidth."""
    profiles = [_load(path) for path in sorted(resource("export", "targets").glob("*.toml"))]
    profiles.sort(key=lambda t: (KINDS.index(t.kind), t.bandwidth_gb_s or 0, t.name))
    return {profile.name: profile for profile in profiles}


def find_target(name: str) -> Target:
    """The profile of a target; raises BadInput that names the nearest for an unknown one."""
    targets = load_targets()
    if name not in targets:
        raise BadInput(
            "unknown target '%s'%s; `edgepool targets` lists them" % (name, suggest(name, targets))
        )
    return targets[name]


def find_targets(names: List[str]) -> List[Target]:
    """The profiles of several targets, each once, in the order given."""
    return [find_target(name) for name in dict.fromkeys(names)]


def _load(path: Path) -> Target:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadInput("%s: cannot be read: %s" % (path, error)) from error
    sections = {"gpu", "software", "image", "precisions", "onnx", "limits", "power"}
    for key in data:
        if key not in sections | {"title", "kind"}:
            raise BadInput("%s: unknown key '%s'" % (path, key))
    gpu, onnx = data.get("gpu", {}), data["onnx"]
    limits, software = data.get("limits", {}), data["software"]
    if data["kind"] not in KINDS or onnx["functions"] not in FUNCTIONS:
        raise BadInput("%s: unknown kind or form of functions" % path)
    return Target(
        name=path.stem,
        title=data["title"],
        kind=data["kind"],
        gpu=gpu.get("name"),
        sm=gpu.get("sm"),
        memory_gib=tuple(gpu.get("memory_gib", ())),
        bandwidth_gb_s=gpu.get("bandwidth_gb_s"),
        software=software,
        image=_image(path, data) if "image" in data else None,
        precisions=tuple(data["precisions"]["supported"]),
        recommended_precision=data["precisions"]["recommended"],
        opset=onnx["opset"],
        ir_version=onnx["ir_version"],
        functions=onnx["functions"],
        operators=onnx.get("operators"),
        top_k=limits.get("top_k"),
        tensor_elements=limits.get("tensor_elements"),
        fp16_tflops=gpu.get("fp16_tflops"),
        int8_tops=gpu.get("int8_tops"),
        power_modes=tuple(PowerMode(**mode) for mode in data.get("power", {}).get("modes", ())),
    )


def _image(path: Path, data: Mapping[str, Any]) -> Image:
    """The table [image]; the versions that it does not give are those of [software]."""
    table, software = data["image"], data["software"]
    unknown = set(table) - {"base", "runtime", "python", "cuda", "tensorrt", "sm", "requirements"}
    if unknown:
        raise BadInput("%s: unknown key '%s' in [image]" % (path, min(unknown)))
    image = Image(
        base=table["base"],
        runtime=table.get("runtime", table["base"]),
        python=table.get("python", software["python"]),
        cuda=table.get("cuda", software.get("cuda")),
        tensorrt=table.get("tensorrt", software.get("tensorrt")),
        sm=tuple(table.get("sm", ())),
        requirements=table["requirements"],
    )
    for name in (image.base, image.runtime):
        if not re.fullmatch(r"[a-z0-9.-]+(/[a-z0-9._-]+)+:(?!latest$)[\w.-]+", name):
            raise BadInput("%s: image '%s' does not name a registry and a version" % (path, name))
    if (image.tensorrt is None) != (not image.sm):
        raise BadInput("%s: an image has TensorRT and `sm`, or neither" % path)
    if image.sm and data["gpu"]["sm"] not in image.sm:
        raise BadInput("%s: `sm` of the image lacks the GPU's own %d" % (path, data["gpu"]["sm"]))
    if data["kind"] == "jetson":
        for key in ("python", "cuda", "tensorrt"):
            ours, boards = getattr(image, key), software[key]
            if ours.split(".")[:2] != boards.split(".")[:2]:
                raise BadInput("%s: the image has %s %s, the board %s" % (path, key, ours, boards))
    return image
