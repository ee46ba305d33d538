"""`edgepool plan`: what a model will take and give on a target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, List

import typer

from ..errors import BadInput
from . import console

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..engine.plan import Fit, Plan


def command(
    model: Path = typer.Argument(
        Path("edgepool-bundle"), metavar="MODEL", help="A bundle folder or a model.pt."
    ),
    target: str = typer.Option(..., help="The device (see `edgepool targets`)."),
    context: int = typer.Option(..., help="Tokens per sequence."),
    batch: int = typer.Option(1, help="Sequences at once."),
    json: bool = console.JSON,
) -> None:
    """Show memory by part, whether it fits, and estimates of the speed, before building anything.

    \b
    Examples:
      edgepool plan --target jetson-agx-orin --context 32768
      edgepool plan model.pt --target jetson-agx-xavier --context 8192 --batch 4
    """
    from ..engine.plan import plan
    from ..targets import find_target

    result = plan(_config(model), find_target(target), context, batch)
    if json:
        console.print_json(result.to_dict())
    else:
        _print(result)


def _config(path: Path) -> ModelConfig:
    if path.is_dir():
        from ..bundle import Bundle

        return Bundle.open(path).config
    if not path.exists():
        raise BadInput("%s: no such file or folder" % path)
    from ..checkpoint import load

    return load(path, check_values=False).config


def _print(result: Plan) -> None:
    names = list(result.memory)
    needs = list(result.memory.values())
    rows: List[List[object]] = []

    def row(title: str, counts: List[int]) -> None:
        if any(counts):
            rows.append([title, *map(console.bytes_text, counts)])

    for dtype in ("fp32", "fp16", "int8"):
        row("weights in %s" % dtype.upper(), [need.weights.get(dtype, 0) for need in needs])
    row("KV pages", [need.kv for need in needs])
    row("index", [need.index for need in needs])
    row("tail", [need.tail for need in needs])
    row("second set of pools", [need.copies for need in needs])
    row("activations, about", [need.activations for need in needs])
    row("workspace, at most", [need.workspace for need in needs])
    row("running", [need.total for need in needs])
    if result.fits["int8"]:
        row("building, about", [need.build_peak for need in needs])
    row("copied in every step", list(result.copied_per_step.values()))
    title = "%s, %d x %d tokens" % (result.target, result.batch, result.context)
    console.print_table([title, *(name.upper() for name in names)], rows)
    fits = [[_size(f.gib, name), *_verdict(f)] for name in names for f in result.fits[name]]
    if fits:
        print()
        columns = ["memory", "runs", "builds there", "largest context"]
        console.print_table(columns, fits)
    _print_speeds(result)


def _size(gib: int, precision: str) -> str:
    return "%d GiB, %s" % (gib, precision.upper())


def _verdict(fit: Fit) -> List[object]:
    words = {True: "yes", False: "no"}
    return [words[fit.runs], words[fit.builds], fit.largest_context]


def _print_speeds(result: Plan) -> None:
    if not result.speeds:
        return
    modes = list(dict.fromkeys(mode for mode, _, _ in result.speeds))
    kinds = list(dict.fromkeys((kind, precision) for _, kind, precision in result.speeds))
    names = ["%s %s" % (kind, precision.upper()) for kind, precision in kinds]
    for title, value in (
        ("prefill, s, at least", lambda speed: speed.prefill_s),
        ("decode, tokens/s, at most", lambda speed: speed.decode_tokens_s),
    ):
        rows = [
            [mode, *(_number(value(result.speeds[(mode, *kind)])) for kind in kinds)]
            for mode in modes
        ]
        print()
        console.print_table(["%s, estimate" % title, *names], rows)


def _number(value: float) -> str:
    return "%.0f" % value if value >= 100 else "%.3g" % value
