"""`edgepool build-plugins`: compile the TensorRT plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Tuple

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
      edgepool build-plugins --target jetson-agx-orin -o plugins
    """
    from ..plugin_library import NAME, default_folder
    from ..plugins_build import build

    sm, ptx = _architecture(target)
    folder = output if output is not None else default_folder(sm)
    with console.progress() as report:
        record = build(sm, folder, report, console.note if verbose else None, ptx)
    library = folder / NAME
    if json:
        console.print_json({"library": str(library), **record})
    else:
        print(library)
        console.note("for sm_%d, with CUDA %s" % (sm, record["cuda"]))


def _architecture(target: Optional[str]) -> Tuple[int, bool]:
    """Compute capability to build for, and whether newer GPUs are to run it, too."""
    if target is not None:
        from ..targets import find_target

        profile = find_target(target)
        if profile.sm is None or not profile.runs_plugins:
            raise BadInput(
                "%s runs no plugins: the bundle's operators are functions there" % profile.name
            )
        return profile.sm, profile.kind != "jetson"
    from ..engine import gpu

    here = gpu.find()
    if here is None:
        raise MissingRequirement(
            "no GPU here to build the plugins for: name one with --target (`edgepool targets`)"
        )
    return here.sm, False
