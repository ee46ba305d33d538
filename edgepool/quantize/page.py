"""quantization.html: the gate's report as one page that needs nothing beside it."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 62em; color: #1c2733; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .15em .9em .15em 0; text-align: left; border-bottom: 1px solid #e2e7ec; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
svg { display: block; margin: .5em 0 1.5em; } text { font-size: 11px; fill: #51606f; }
.int8 { fill: #2f7dd1; } .float { fill: #d9822b; } .axis { stroke: #c6cfd8; stroke-width: 1; }
"""
WIDTH, HEIGHT, LEFT, BOTTOM = 900, 180, 48, 18


def page(record: Mapping[str, Any]) -> str:
    """The page for a record as `gate.write_report` makes it."""
    judged, groups, layers = record["gate"], record["groups"], record["layers"]
    rows = [
        ("tokens judged", f"{judged['tokens']}"),
        ("perplexity, FP32", f"{judged['perplexity_fp32']:.4f}"),
        ("perplexity, INT8", f"{judged['perplexity']:.4f}"),
        (
            "increase, and its standard error",
            f"{judged['perplexity_increase']:+.2f} % ± {judged['perplexity_error']:.2f}",
        ),
        ("same most likely token", f"{judged['top1_agreement']:.2f} %"),
        ("KL divergence", f"{judged['kl']:.5f} nats"),
        ("INT8 multiply-adds", f"{100 * record['int8_multiply_adds']:.1f} % of the linear layers'"),
        ("with an input that goes in once", f"{100 * record['int8_multiply_adds_once']:.1f} %"),
        ("calibration", f"{record['data']['tokens']} tokens, {record['data']['kind']}"),
    ]
    names = list(groups)
    int8 = [groups[name]["int8_inputs"] for name in names]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>INT8 report</title>",
        f"<style>{STYLE}</style><h1>INT8 against FP32</h1>",
        _table(("", ""), rows),
        "<h2>Error of each layer's output</h2>",
        "<p>|INT8 - FP32| / |FP32| over all tokens; errors of earlier layers are in it.</p>",
        _bars(list(layers), [layer["relative"] for layer in layers.values()]),
        "<h2>Error of each linear layer from its INT8 input</h2>",
        "<p>Measured alone, on FP32 values. Blue: the input is INT8; orange: it stays float.</p>",
        _bars(names, [groups[name]["input_error"] for name in names], int8),
        "<h2>Range of each linear layer's input</h2>",
        "<p>From the lowest to the highest value that calibration saw.</p>",
        _ranges(names, [(groups[n]["lowest"], groups[n]["highest"]) for n in names], int8),
        "<h2>What is INT8</h2>",
        _table(
            ("linear layers", "input", "scale", "lost by input", "lost by weights"),
            [
                (
                    ", ".join(groups[n]["readers"]),
                    input_form(groups[n]),
                    f"{groups[n]['scale']:.4g}",
                    f"{100 * groups[n]['input_error']:.2f} %",
                    f"{100 * groups[n]['weight_error']:.2f} %",
                )
                for n in names
            ],
        ),
    ]
    if len(record["curve"]) > 1:
        parts += [
            "<h2>Quality against share in INT8</h2>",
            _table(
                ("float inputs", "INT8 multiply-adds", "perplexity", "agreement"),
                [
                    (
                        f"{point['float_inputs']}",
                        f"{100 * point['int8_multiply_adds']:.1f} %",
                        f"{point['perplexity_increase']:+.2f} %",
                        f"{point['top1_agreement']:.2f} %",
                    )
                    for point in record["curve"]
                ],
            ),
        ]
    return "\n".join(parts) + "\n"


def input_form(group: Mapping[str, Any]) -> str:
    """How the input of a group of linear layers goes in."""
    if group["halved"]:
        return "INT8 halves"
    return "INT8" if group["int8_inputs"] else "float"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headings)
    lines = []
    for row in rows:
        cells = "".join(
            f"<td{' class=n' if i else ''}>{html.escape(cell)}</td>" for i, cell in enumerate(row)
        )
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _bars(names: Sequence[str], values: Sequence[float], int8: Sequence[bool] | None = None) -> str:
    """A bar for each value, from zero to the largest."""
    top = max(values, default=0.0) or 1.0
    width = (WIDTH - LEFT) / max(len(values), 1)
    shapes = [_axis(f"{100 * top:.2g} %", "0")]
    for i, (name, value) in enumerate(zip(names, values)):
        height = HEIGHT * value / top
        kind = "int8" if int8 is None or int8[i] else "float"
        label = f"{name}: {100 * value:.3f} %"
        shapes.append(_rect(LEFT + i * width, HEIGHT - height, width, height, kind, label))
    return _svg(shapes, names)


def _ranges(
    names: Sequence[str], ranges: Sequence[tuple[float, float]], int8: Sequence[bool]
) -> str:
    """A bar from lowest to highest for each, on a scale of signed logarithms."""
    top = max((max(abs(a), abs(b)) for a, b in ranges), default=0.0) or 1.0
    width = (WIDTH - LEFT) / max(len(ranges), 1)

    def place(value: float) -> float:
        bent = math.copysign(math.log1p(abs(value)), value) / math.log1p(top)
        return HEIGHT / 2 * (1 - bent)

    shapes = [_axis(f"{top:.3g}", f"{-top:.3g}")]
    for i, (name, (low, high)) in enumerate(zip(names, ranges)):
        y, kind = place(high), "int8" if int8[i] else "float"
        label = f"{name}: {low:.4g} to {high:.4g}"
        shapes.append(_rect(LEFT + i * width, y, width, place(low) - y, kind, label))
    return _svg(shapes, names)


def _rect(x: float, y: float, width: float, height: float, kind: str, label: str) -> str:
    return (
        f"<rect class='{kind}' x='{x:.1f}' y='{y:.1f}' width='{max(width - 1, 0.5):.1f}' "
        f"height='{max(height, 0.5):.1f}'><title>{html.escape(label)}</title></rect>"
    )


def _axis(top: str, bottom: str) -> str:
    return (
        f"<line class='axis' x1='{LEFT}' y1='0' x2='{LEFT}' y2='{HEIGHT}'/>"
        f"<text x='0' y='11'>{html.escape(top)}</text><text x='0' y='{HEIGHT}'>{bottom}</text>"
    )


def _svg(shapes: Sequence[str], names: Sequence[str]) -> str:
    ends = ""
    if names:
        y = HEIGHT + BOTTOM - 4
        ends = f"<text x='{LEFT}' y='{y}'>{html.escape(names[0])}</text>"
        ends += f"<text x='{WIDTH}' y='{y}' text-anchor='end'>{html.escape(names[-1])}</text>"
    return f"<svg width='{WIDTH}' height='{HEIGHT + BOTTOM}'>{''.join(shapes)}{ends}</svg>"
