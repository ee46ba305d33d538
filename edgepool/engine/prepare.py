"""What an engine is built from, made first where the bundle lacks it.

    model.onnx ──lower──▶ variants/TARGET/model.onnx        a target that runs plugins
               ──calibrate, quantize──▶ model.int8.onnx     --int8
               ──calibrate, judge──▶ model.fp16.onnx        --fp16
    and the same for the target ──▶ variants/TARGET/model.int8.onnx, model.fp16.onnx

That takes PyTorch and the `onnx` package, which a PC has and a board has not.
"""

from __future__ import annotations

import importlib.util
import shlex
from typing import Any, Callable, Dict, Optional

from ..bundle import Bundle
from ..errors import BadInput, GateFailed, MissingRequirement
from ..progress import Report
from ..targets import Target
from .graphs import flag, graph_name

Say = Callable[[str], None]  # one line for the person, as it happens

CALIBRATION = "calibration.json"
TOOLS = ("torch", "onnx", "onnx_ir", "onnxscript")
RECORDED = ("calibration", "alpha", "kv_dtype", "float_inputs", "variants", "gate")


def complete(
    bundle: Bundle,
    target: Optional[Target],
    precision: str,
    runtime: str,
    report: Report,
    say: Say,
) -> Bundle:
    """The bundle with the graph that `graphs.source` takes; nothing is made twice.

    Raises GateFailed where INT8 or FP16 is too far from FP32, BadInput for an INT8 graph that does
    not belong to the bundle's calibration, MissingRequirement on a machine that can make none.
    """
    name = graph_name(bundle, target, precision, runtime)
    if precision == "int8":
        check_int8(bundle)
    if name in bundle.manifest["files"]:
        if precision == "int8":
            say("%s is there already: INT8 %s" % (bundle.path / name, _judged(bundle)))
        return bundle
    _require_tools(bundle, target, precision, name)
    if target is not None and runtime == "tensorrt":
        bundle = _lowered(bundle, target, report, say)
    if precision == "int8":
        bundle = _quantised(bundle, target if runtime == "tensorrt" else None, report, say)
    elif precision == "fp16" and bundle.manifest["dtype"] == "fp32":
        bundle = _in_fp16(bundle, target if runtime == "tensorrt" else None, report, say)
    return bundle


def check_int8(bundle: Bundle) -> None:
    """Raise BadInput for INT8 graphs that were made from another calibration than the bundle's."""
    made, files = bundle.manifest["quantization"], bundle.manifest["files"]
    if made is None:
        return
    digest = files[CALIBRATION]["sha256"] if CALIBRATION in files else None
    if any(key not in made for key in RECORDED) or made["calibration"] != digest:
        raise BadInput(
            "%s: model.int8.onnx was not made from this calibration.json: run `edgepool quantize "
            "%s` again" % (bundle.path, shlex.quote(str(bundle.path)))
        )


def _require_tools(bundle: Bundle, target: Optional[Target], precision: str, name: str) -> None:
    """Raise MissingRequirement where the packages that make graphs are not installed."""
    missing = [tool for tool in TOOLS if importlib.util.find_spec(tool) is None]
    if missing:
        raise MissingRequirement(
            "%s: it has no %s, and this machine cannot make it (no Python package '%s'): on the PC "
            "that exported it, run `edgepool build-engine %s%s%s`, then copy the bundle here again"
            % (
                bundle.path,
                name,
                missing[0],
                shlex.quote(bundle.path.resolve().name),
                flag(bundle, precision),
                " --target %s" % target.name if target is not None else "",
            )
        )


def _lowered(bundle: Bundle, target: Target, report: Report, say: Say) -> Bundle:
    """The bundle with the target's variant in its own float type."""
    if target.name in bundle.manifest["variants"]:
        return bundle
    from ..quantize.variants import add_target

    say("no variant for %s yet: lowering model.onnx for it" % target.name)
    return add_target(bundle.path, target, report)


def _calibrated(bundle: Bundle, report: Report, say: Say) -> Bundle:
    """The bundle with a calibration, whose held-out text both gates judge by."""
    if CALIBRATION in bundle.manifest["files"]:
        return bundle
    from ..quantize.calibrate import Options, calibrate

    say(
        "no calibration yet: calibrating on text that the model writes itself "
        "(`edgepool calibrate --data` takes yours)"
    )
    calibrate(bundle.path, Options(), report)
    return Bundle.open(bundle.path)


def _quantised(bundle: Bundle, target: Optional[Target], report: Report, say: Say) -> Bundle:
    """The bundle with its INT8 graphs, judged, the target's among them."""
    from ..quantize.quantize import quantize_bundle
    from ..quantize.variants import add_int8

    if bundle.manifest["quantization"] is None:
        bundle = _calibrated(bundle, report, say)
        say("quantizing to INT8, and judging it against FP32 on held-out text")
        try:
            bundle = quantize_bundle(bundle.path, report=report)
        except GateFailed as failure:
            raise GateFailed(
                "%s (`edgepool quantize %s --auto`); no engine was built"
                % (failure, shlex.quote(str(bundle.path)))
            ) from failure
        say("INT8 %s" % _judged(bundle))
    if target is not None and target.name not in bundle.manifest["quantization"]["variants"]:
        say("writing the INT8 graph for %s" % target.name)
        bundle = add_int8(bundle.path, target, report)
    return bundle


def _in_fp16(bundle: Bundle, target: Optional[Target], report: Report, say: Say) -> Bundle:
    """The FP32 bundle with an FP16 graph, in which what overflows stays FP32."""
    from ..quantize.variants import add_fp16, read_fp16

    bundle = _calibrated(bundle, report, say)
    say("writing the FP16 graph, judged in PyTorch on held-out text")
    bundle = add_fp16(bundle.path, target, report)
    judged = read_fp16(bundle)
    assert judged is not None
    say("FP16 %s" % _figures(judged["gate"]))
    for node, largest in judged["overflows"].items():
        say("%s gives %.4g, beyond FP16: it stays FP32" % (node, largest))
    return bundle


def _judged(bundle: Bundle) -> str:
    """What the gate of `edgepool quantize` found."""
    return _figures(bundle.manifest["quantization"]["gate"])


def _figures(gate: Dict[str, Any]) -> str:
    return "costs %+.2f %% perplexity and agrees on %.1f %% of %d tokens" % (
        gate["perplexity_increase"],
        gate["top1_agreement"],
        gate["tokens"],
    )
