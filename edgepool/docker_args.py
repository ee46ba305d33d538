"""The build arguments of a target's container, from its profile; Dockerfile and Dockerfile.jetson
take them."""

from __future__ import annotations

from typing import Dict

from . import __version__
from .errors import BadInput
from .targets import Target


def dockerfile(target: Target) -> str:
    """The file, beside the package in a checkout, that `build_args` are for."""
    return "Dockerfile.jetson" if target.kind == "jetson" else "Dockerfile"


def build_args(target: Target) -> Dict[str, str]:
    """Name and value of each build argument. Raises BadInput for a target that has no container."""
    image = target.image
    if image is None:
        raise BadInput(
            "%s has no container: engines of TensorRT-RTX run where they are wanted" % target.name
        )
    arguments = {
        "BASE_IMAGE": image.base,
        "RUNTIME_IMAGE": image.runtime,
        "PYTHON": image.python,
        "REQUIREMENTS": image.requirements,
    }
    if image.cuda and image.tensorrt:
        # Datacenter GPUs get successors that PTX serves; a board's TensorRT knows no other GPU.
        suffix = "-real" if target.kind == "jetson" else ""
        arguments["CUDA"] = image.cuda
        arguments["TENSORRT"] = image.tensorrt
        arguments["ARCHITECTURES"] = ",".join("%d%s" % (sm, suffix) for sm in image.sm)
    else:
        arguments["PLUGINS"] = "none"
    arguments["VERSION"] = __version__
    return arguments


def command_line(arguments: Dict[str, str]) -> str:
    """The arguments as `docker build` takes them."""
    return " ".join("--build-arg %s=%s" % item for item in arguments.items())
