"""`edgepool check`: will a target's TensorRT read this graph, and as it was meant?"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional

import typer

from ..errors import GateFailed
from . import console

if TYPE_CHECKING:
    from ..engine.preflight import Finding, Report

PLACES = 5  # of one rule, shown in the table; JSON and HTML have all


def command(
    model: Path = typer.Argument(
        Path("edgepool-bundle"), metavar="MODEL", help="An ONNX file or a bundle folder."
    ),
    target: str = typer.Option(..., help="Whose TensorRT reads it (see `edgepool targets`)."),
    format: str = typer.Option("table", help="table, json or html."),
    fail_on: str = typer.Option("error", help="error or warning: what makes the command fail."),
    plugin: Optional[List[str]] = typer.Option(
        None, help="An operator that your plugin library registers; can be repeated."
    ),
    calibrator: bool = typer.Option(
        False, "--calibrator", help="The build will also be given an INT8 calibrator."
    ),
) -> None:
    """Check an ONNX file, any one, against what a target's parser refuses or misreads.

    \b
    Examples:
      edgepool check --target jetson-agx-xavier
      edgepool check resnet50.onnx --target jetson-agx-orin --fail-on warning
      edgepool check --target rtx-4090 --format html > report.html
    """
    from ..engine.preflight import ERROR, WARNING, check
    from ..targets import find_target

    console.one_of("--format", format, ("table", "json", "html"))
    console.one_of("--fail-on", fail_on, (ERROR, WARNING))
    report = check(model, find_target(target), plugin or (), calibrator)
    if format == "json":
        console.print_json(report.to_dict())
    elif format == "html":
        from ..engine.preflight.page import html_page

        print(html_page(report))
    elif report.findings:
        _print(report)
    errors, warnings = report.count(ERROR), report.count(WARNING)
    names = " and ".join(str(graph) for graph in report.graphs)
    counted = "%s: %s" % (report.reader, _counted(errors, warnings))
    if errors or (warnings and fail_on == WARNING):
        raise GateFailed("%s: not ready for %s" % (names, counted))
    console.note("%s: ready for %s" % (names, counted))


def _print(report: Report) -> None:
    for number, (_, group) in enumerate(groupby(report.findings, lambda f: f.rule)):
        found = list(group)
        first = found[0]
        rows = [[_place(finding, report), finding.what] for finding in found[:PLACES]]
        if len(found) > PLACES:
            rows.append(["and %d more" % (len(found) - PLACES), ""])
        if number:
            print()
        print("%s %s: %s" % (first.rule, first.severity, first.title))
        print("  " + first.remedy)
        console.print_table(["where", "what"], rows)


def _place(finding: Finding, report: Report) -> str:
    """Where it is; with the file's name where there are two."""
    several = len(report.graphs) > 1
    return "%s: %s" % (Path(finding.graph).name, finding.where) if several else finding.where


def _counted(errors: int, warnings: int) -> str:
    counts = [(errors, "error"), (warnings, "warning")]
    texts = ["%d %s%s" % (n, word, "" if n == 1 else "s") for n, word in counts if n]
    return " and ".join(texts) or "nothing found"
