"""`edgepool quantize`: INT8 weights and activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional

import typer

from . import console

WORST = 8  # linear layers in the table


def command(
    bundle: Path = typer.Argument(Path("edgepool-bundle"), metavar="BUNDLE", help="The bundle."),
    auto: bool = typer.Option(
        False, "--auto", help="Leave the fewest inputs in float that make it pass."
    ),
    alpha: Optional[float] = typer.Option(
        None, help="How far SmoothQuant moves outliers into weights, 0..1; default: the best each."
    ),
    float_kv: bool = typer.Option(False, "--float-kv", help="Keep KV pages and index in float."),
    data: Optional[List[Path]] = typer.Option(
        None, help="Text to judge by, as for calibrate; default: what calibration held out."
    ),
    tokens: int = typer.Option(4096, help="How many tokens of it to judge by."),
    max_perplexity: float = typer.Option(
        1.0, help="The most that perplexity may rise, in per cent."
    ),
    min_agreement: float = typer.Option(93.0, help="The least top-1 agreement, in per cent."),
    fp16: bool = typer.Option(
        False, "--fp16", help="Judge FP16 instead, in PyTorch; writes nothing."
    ),
    json: bool = console.JSON,
) -> None:
    """Write the bundle's graphs in INT8: weights, activations, KV pages and index.

    They are judged against FP32 on text that calibration has not seen; the command fails, and
    writes nothing, beyond the limits. Calibrates first, on what the model writes itself, where
    `edgepool calibrate` has not been run.

    \b
    Examples:
      edgepool quantize
      edgepool quantize my-bundle --auto
      edgepool quantize --data held-out.txt --max-perplexity 0.5
      edgepool quantize --fp16
    """
    from ..quantize.gate import Limits, read_report
    from ..quantize.quantize import Options, judge_fp16, quantize_bundle

    limits = Limits(max_perplexity, min_agreement)
    options = Options(alpha, not float_kv, (), auto, limits, data or (), tokens)
    if fp16:
        with console.progress() as report:
            outcome = judge_fp16(bundle, options, report)
        _print_fp16(outcome, json)
        return
    with console.progress() as report:
        result = quantize_bundle(bundle, options, report)
    quantization, record = result.manifest["quantization"], read_report(bundle)
    if json:
        console.print_json({"bundle": str(bundle), **quantization, "layers": record["layers"]})
        return
    _print(record)
    files = result.manifest["files"]
    sizes = [files[name]["bytes"] for name in (quantization["model"], "model.onnx")]
    console.note(
        "wrote %s (%s, %.2f of model.onnx) and quantization.html"
        % (bundle / quantization["model"], console.bytes_text(sizes[0]), sizes[0] / sizes[1])
    )


def _print_fp16(outcome: Dict[str, Any], json: bool) -> None:
    if json:
        console.print_json(outcome)
        return
    console.print_table(["FP16", "against FP32"], _judged_rows(outcome["gate"], "FP16"))
    for node, largest in outcome["overflows"].items():
        console.note("%s gives %.4g, beyond FP16: it has to stay FP32" % (node, largest))


def _judged_rows(judged: Dict[str, Any], what: str) -> List[List[str]]:
    return [
        [
            "perplexity",
            "%.4f in FP32, %.4f in %s (%+.3f %% +- %.3f)"
            % (
                judged["perplexity_fp32"],
                judged["perplexity"],
                what,
                judged["perplexity_increase"],
                judged["perplexity_error"],
            ),
        ],
        ["same token preferred", "%.2f %% of %d" % (judged["top1_agreement"], judged["tokens"])],
        ["KL divergence", "%.6f nats" % judged["kl"]],
    ]


def _print(record: Dict[str, Any]) -> None:
    from ..quantize.page import input_form

    rows = _judged_rows(record["gate"], "INT8")
    shares = tuple(100 * record[f"int8_multiply_adds{kind}"] for kind in ("", "_once"))
    rows.append(["INT8 multiply-adds", "%.1f %%, %.1f %% with an input that goes in once" % shares])
    console.print_table(["INT8", "against FP32"], rows)
    groups = sorted(record["groups"].items(), key=lambda item: -item[1]["input_error"])[:WORST]
    console.print_table(
        ["linear layer", "input", "lost by an INT8 input", "by INT8 weights"],
        [
            [
                name,
                input_form(group),
                "%.2f %%" % (100 * group["input_error"]),
                "%.2f %%" % (100 * group["weight_error"]),
            ]
            for name, group in groups
        ],
    )
