"""`edgepool build-plugins`: compile the TensorRT plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import typer

from ..errors import BadInput, MissingRequirement
from . import console


def command(
    target: Optional[str] = typer.Option(
        None, metavar="TARGET", help="The device it is to run on; this machine's GPU by default."
    ),
    output: Optional[Path] = typer.Option(
        None,
        "--output",
        "-o",
        metavar="DIR",
        help="Folder for the library; by default where build-engine looks for it.",
    ),
    verbose: bool = typer.Option(False, "--verbose", help="Show what the compilers print."),
    json: bool = console.JSON,
) -> None:
    """Compile the TensorRT plugins of edgepool's operators with this machine's CUDA and TensorRT.

    It needs CMake, nvcc, a C++ compiler and TensorRT's headers, and takes minutes.

    \b
    Examples:
      edgepool build-plugins
      edgepool build-plugins --target jetson-agx-orin -o orin-plugins
    """
    from ..plugin_library import NAME, default_folder
    from ..plugins_build import build

    sm, options = _gpu_here() if target is None else _gpu_of(target)
    folder = output if output is not None else default_folder(sm)
    with console.progress() as report:
        record = build(sm, folder, report, console.note if verbose else None, **options)
    library = folder / NAME
    if json:
        console.print_json({"library": str(library), **record})
    else:
        print(library)
        console.note("for sm_%d, with CUDA %s" % (sm, record["cuda"]))


def _gpu_of(name: str) -> Tuple[int, Dict[str, Any]]:
    """Compute capability of a target, and what else the build has to know of it."""
    from ..targets import find_target

    target = find_target(name)
    if target.sm is None or not target.runs_plugins:
        raise BadInput("%s runs no plugins: the bundle's operators are functions there" % name)
    tensorrt = int(target.software["tensorrt"].split(".")[0])
    if target.kind == "jetson":
        return target.sm, {"tensorrt": tensorrt}
    return target.sm, {"ptx": True}


def _gpu_here() -> Tuple[int, Dict[str, Any]]:
    from ..engine import gpu

    here = gpu.find()
    if here is None:
        raise MissingRequirement(
            "no GPU here to build the plugins for: name one with --target (`edgepool targets`)"
        )
    return here.sm, {}
