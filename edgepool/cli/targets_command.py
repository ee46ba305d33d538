"""`edgepool targets`: the machines that a bundle can be made for."""

from __future__ import annotations

from typing import Mapping, Optional

import typer

from . import console


def command(
    name: Optional[str] = typer.Argument(None, help="Show everything about one target."),
    json: bool = console.JSON,
) -> None:
    """List the targets of `edgepool export --target`, or all that is known about one.

    ops as: whether the edgepool operators are TensorRT plugins there, or functions in the file.

    \b
    Examples:
      edgepool targets
      edgepool targets jetson-agx-orin
      edgepool targets --json
    """
    from ..targets import find_target, load_targets

    if name is not None:
        record = find_target(name).to_dict()
        if json:
            console.print_json(record)
        else:
            console.print_table(["", name], [[key, _text(value)] for key, value in record.items()])
        return
    targets = load_targets()
    if json:
        console.print_json({name: target.to_dict() for name, target in targets.items()})
        return
    rows = [
        [
            t.name,
            "sm_%d" % t.sm if t.sm else "-",
            "/".join(map(str, t.memory_gib)) or "-",
            "%g" % t.bandwidth_gb_s if t.bandwidth_gb_s else "-",
            _runtime(t.software),
            t.opset,
            "plugins" if t.runs_plugins else "functions",
            " ".join(p for p in t.precisions if p not in ("fp32", "tf32")),
        ]
        for t in targets.values()
    ]
    columns = ["target", "GPU", "GiB", "GB/s", "runtime", "opset", "ops as", "precisions"]
    console.print_table(columns, rows)


def _runtime(software: Mapping[str, str]) -> str:
    names = {"tensorrt": "TensorRT", "tensorrt_rtx": "RTX", "onnxruntime": "ORT"}
    return next("%s %s" % (text, software[key]) for key, text in names.items() if key in software)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join("%s %s" % item for item in value.items())
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value)
    return "-" if value is None else str(value)
