"""`edgepool export`: a model.pt becomes a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional

import typer

from . import console


def command(
    model: Path = typer.Argument(..., metavar="MODEL.PT", help="What `edgepool import` wrote."),
    output: Path = typer.Option(
        Path("edgepool-bundle"), "--output", "-o", help="The bundle folder to write."
    ),
    target: Optional[List[str]] = typer.Option(
        None, help="Also lower the graph for this target (see `edgepool targets`); can be repeated."
    ),
    max_context: Optional[int] = typer.Option(None, help="A shorter context than the model's."),
    dtype: str = typer.Option("fp32", help="fp32 or fp16, of weights, activations and KV pages."),
    opset: int = typer.Option(20, help="ONNX opset of model.onnx: 20, 21 or 22."),
    json: bool = console.JSON,
) -> None:
    """Export a model to ONNX and prove it equal to PyTorch.

    \b
    Examples:
      edgepool export model.pt
      edgepool export model.pt -o orin-bundle --target jetson-agx-orin --dtype fp16
      edgepool export model.pt --max-context 32768
    """
    from ..exporter.export import Options, export

    options = Options(output, target or (), max_context, dtype, opset)
    with console.progress() as report:
        bundle = export(model, options, report)
    manifest = bundle.manifest
    size = sum(record["bytes"] for record in manifest["files"].values())
    if json:
        record = {"bundle": str(output), "bytes": size}
        keys = ("opset", "dtype", "functions", "variants", "parity")
        console.print_json({**record, **{key: manifest[key] for key in keys}})
        return
    for name, parity in manifest["parity"].items():
        console.note(
            "%s equals PyTorch: logits within %.2g over %d tokens, %d of %d selected blocks differ"
            % (
                name,
                parity["max_logit_difference"],
                parity["tokens"],
                parity["selection_flips"],
                parity["selections"],
            )
        )
        if parity["selections"] and not parity["choices"]:
            console.note("note: the prompts were too short for the index to leave a block out")
        if "float16" in parity:
            console.note("computed in float16, every value is finite and within its limit")
    console.note("wrote %s (%s)" % (output, console.bytes_text(size)))
