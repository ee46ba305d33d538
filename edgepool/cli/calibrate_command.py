"""`edgepool calibrate`: measures the ranges that INT8 needs."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional

import typer

from . import console


def command(
    bundle: Path = typer.Argument(Path("edgepool-bundle"), metavar="BUNDLE", help="The bundle."),
    data: Optional[List[Path]] = typer.Option(
        None, help="Text, JSON lines (key 'text') or npz (array 'input_ids'); can be repeated."
    ),
    samples: Optional[int] = typer.Option(None, help="Sequences: 64, or 8 without data."),
    length: Optional[int] = typer.Option(
        None, help="Tokens of a sequence: 1024, or 256 without data. One in 16 is 4 times as long."
    ),
    method: str = typer.Option("minmax", help="minmax, entropy or percentile."),
    json: bool = console.JSON,
) -> None:
    """Measure the ranges of activations and store them in the bundle, as calibration.json.

    Runs on ONNX Runtime. Without data the model writes the sequences itself. Some tokens are held
    out, for `edgepool quantize` to judge by.

    \b
    Examples:
      edgepool calibrate --data corpus.txt
      edgepool calibrate my-bundle --data chats.jsonl --data code.txt --samples 128
      edgepool calibrate --method percentile
    """
    from ..quantize.calibrate import Options, calibrate

    options = Options(data or (), samples, length, method)
    with console.progress() as report:
        result = calibrate(bundle, options, report)
    if json:
        console.print_json(
            {
                "bundle": str(bundle),
                "method": result.method,
                "model": result.model,
                "digest": result.digest,
                "data": result.data,
                "held_out": len(result.held_out),
                "tensors": {
                    name: {"lowest": tensor.lowest, "highest": tensor.highest}
                    for name, tensor in result.tensors.items()
                },
            }
        )
        return
    source = result.data
    console.note(
        "calibrated on %d sequences, %d tokens, %s; %d tokens held out"
        % (
            source["samples"],
            source["tokens"],
            source["kind"] if not source["files"] else ", ".join(source["files"]),
            len(result.held_out),
        )
    )
    console.note("wrote %s" % (bundle / "calibration.json"))
