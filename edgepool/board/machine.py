"""What of `edgepool doctor`'s lines stands in the way of a backend."""

from __future__ import annotations

from pathlib import Path
from typing import List

from ..engine.doctor import examine
from ..engine.line import OK, Line
from ..errors import MissingRequirement

# What only engines need.
OF_THE_GPU = (
    "JetPack",
    "driver",
    "GPU",
    "CUDA",
    "cuDNN",
    "TensorRT",
    "TensorRT's ONNX parser",
    "TensorRT for Python",
    "TensorRT-RTX",
    "plugin library",
)
# These say how well it will go; whether it goes, the steps that need them find out.
ADVICE = ("board", "power mode", "memory", "swap", "disk")


def machine_lines(backend: str, root: Path) -> List[Line]:
    """Doctor's lines about the machine below `root`, those that matter to the backend."""
    lines = examine(root)
    return [x for x in lines if backend == "trt" or x.name not in OF_THE_GPU]


def require(lines: List[Line]) -> None:
    """Raise MissingRequirement for the first line that stands in the way."""
    faults = [x for x in lines if x.state != OK and x.name not in ADVICE]
    if faults:
        first = faults[0]
        more = "" if len(faults) == 1 else " (and %d more: see the lines above)" % (len(faults) - 1)
        raise MissingRequirement("%s: %s: %s%s" % (first.name, first.found, first.fix, more))
