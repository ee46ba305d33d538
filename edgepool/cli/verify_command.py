"""`edgepool verify`: is a bundle what PyTorch computes?"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from ..errors import GateFailed
from . import console


def command(
    bundle: Path = typer.Argument(Path("edgepool-bundle"), metavar="BUNDLE", help="The bundle."),
    against: Path = typer.Option(..., metavar="MODEL.PT", help="What it was exported from."),
    json: bool = console.JSON,
) -> None:
    """Check a bundle's files by sha256, and its graph against PyTorch, layer by layer.

    \b
    Examples:
      edgepool verify --against model.pt
      edgepool verify orin-bundle --against model.pt --json
    """
    from ..exporter.verify import verify

    with console.progress() as report:
        result = verify(bundle, against, report)
    if json:
        console.print_json(
            {
                "passed": result.passed,
                "same_source": result.same_source,
                "differences": [dataclasses.asdict(d) for d in result.differences],
                "parity": result.outcome.to_dict(),
            }
        )
    else:
        verdicts = {True: "ok", False: "FAILED"}
        rows = [
            [d.name, *("%.3g" % x for x in (d.largest, d.mean, d.limit, d.rms)), verdicts[d.passed]]
            for d in result.differences
        ]
        columns = ["value", "largest", "mean", "limit", "rms", ""]
        console.print_table(columns, rows, title="differences from PyTorch")
    if not result.same_source:
        console.note("note: the bundle was exported from another file than %s" % against)
    failed = [d for d in result.differences if not d.passed]
    if failed:
        raise GateFailed(
            "%s: '%s' differs from PyTorch by %.3g (limit %.3g), and %d more"
            % (bundle, failed[0].name, failed[0].largest, failed[0].limit, len(failed) - 1)
        )
    result.outcome.require(str(bundle))
