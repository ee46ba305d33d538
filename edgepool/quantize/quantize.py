"""`edgepool quantize`: model.int8.onnx beside model.onnx and in every variant, judged by a gate."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from .. import __version__
from ..bundle import GRAPHS, Bundle
from ..config import ModelConfig, state_specs
from ..errors import BadInput, GateFailed
from ..exporter import lower
from ..exporter.export import FORM, check_saved, hide_layers
from ..exporter.graph import STEP_INPUTS
from ..exporter.stamp import model_skeleton
from ..exporter.weights import write_model
from ..progress import Report, silent
from ..targets import Target, find_target
from . import calibrate as calibration_step
from . import data, embedding, fp16, gate, qdq, record
from .amend import amended
from .rounding import rounded_weights
from .sensitivity import sensitivities
from .source import Source, prepare

NAME = GRAPHS["int8"]


@dataclass(frozen=True)
class Options:
    """What the user chose.

    alpha: of SmoothQuant, by default the best for each input; kv: INT8 pages and index too;
    float_inputs: groups of linears whose inputs stay float; auto: find the fewest that pass.
    files: text to judge by, by default what calibration held out; tokens: how much of it.
    """

    alpha: float | None = None
    kv: bool = True
    float_inputs: tuple[str, ...] = ()
    auto: bool = False
    limits: gate.Limits = gate.Limits()
    files: Sequence[Path] = ()
    tokens: int = gate.TOKENS


def quantize_bundle(path: Path, options: Options | None = None, report: Report = silent) -> Bundle:
    """Write the INT8 graphs of the bundle at `path`; calibrates it first where that is not done.

    Raises BadInput for a bundle, calibration or option that cannot be used, and GateFailed, naming
    the layers that lost most, for INT8 that is too far from FP32; then the bundle is as it was.
    """
    options = options or Options()
    bundle = Bundle.open(path)
    check(bundle, options)
    if record.NAME not in bundle.manifest["files"]:
        calibration_step.calibrate(path, calibration_step.Options(), report)
        bundle = Bundle.open(path)
    source = prepare(bundle, options.alpha, options.kv)
    source.check_names(options.float_inputs)
    ids = held_out_tokens(bundle, options)
    old = [name for name in bundle.manifest["files"] if is_ours(name)]
    with amended(bundle, without=tuple(old)) as (folder, manifest):
        with TemporaryDirectory(dir=folder, prefix="rounded-") as temporary:
            rounded = rounded_weights(source, Path(temporary), report)

            def judge(float_inputs: Collection[str]) -> gate.Comparison:
                write(source, rounded, folder / NAME, float_inputs, None, report)
                return gate.judge(source, folder / NAME, ids, report)

            measured = sensitivities(source, rounded)
            verdict = gate.decide(
                source, options.float_inputs, options.auto, options.limits, measured, judge
            )
            variants = {}
            for name, variant in bundle.manifest["variants"].items():
                place, target = Path(variant["model"]).parent / NAME, find_target(name)
                if variant["model"] != "model.onnx":
                    write(source, rounded, folder / place, verdict.float_inputs, target, report)
                variants[name] = place.as_posix()
        gate.write_report(verdict, source, folder)
        manifest["quantization"] = {
            "edgepool": __version__,
            "model": NAME,
            "variants": variants,
            "calibration": source.calibration.digest,
            "kv_dtype": source.config.kv_dtype,
            "alpha": options.alpha,
            **verdict.summary(source),
        }
    return Bundle.open(path)


def judge_fp16(path: Path, options: Options, report: Report = silent) -> dict[str, Any]:
    """What FP16 would cost: its figures, and the nodes that overflow, by the largest |value|.

    Raises GateFailed beyond the limits, with those nodes in FP32.
    """
    bundle = Bundle.open(path)
    check(bundle, options)
    ids = held_out_tokens(bundle, options)
    outcome = fp16.judge(fp16.reference_model(bundle), ids, report)
    judged = gate.judged(outcome.comparison, options.limits)
    if not options.limits.passed_by(outcome.comparison):
        raise GateFailed(
            f"{path}: FP16 costs {judged['perplexity_increase']:+.2f} % perplexity and agrees on "
            f"{judged['top1_agreement']:.1f} % of tokens: deploy it in FP32 or BF16"
        )
    return {"bundle": str(path), "gate": judged, "overflows": outcome.overflows}


def check(bundle: Bundle, options: Options) -> None:
    calibration_step.check(bundle, calibration_step.Options())
    if options.alpha is not None and not 0 <= options.alpha <= 1:
        raise BadInput(f"--alpha {options.alpha:g}: choose a number from 0 to 1")
    if options.tokens < 2:
        raise BadInput(f"--tokens {options.tokens}: the gate needs at least 2")


def is_ours(name: str) -> bool:
    """Whether a file of a bundle is an INT8 graph, its external data or a report about them."""
    return Path(name).name in (NAME, f"{NAME}.data") or name in gate.REPORTS


def held_out_tokens(bundle: Bundle, options: Options) -> np.ndarray:
    """The text that the gate judges by, [n] int32: the user's, or what calibration held out."""
    if options.files:
        encode = None
        if bundle.tokenizer_path is not None:
            encode = calibration_step.encoder(bundle.tokenizer_path)
        most = min(options.tokens, bundle.config.max_context)
        parts = [data.read_tokens(f, encode, bundle.config, most) for f in options.files]
        ids = np.concatenate(parts)[:most]
        where = ", ".join(map(str, options.files))
    else:
        if record.NAME not in bundle.manifest["files"]:
            raise BadInput(f"{bundle.path}: no text to judge by: name one with --data")
        ids = record.read(bundle.file(record.NAME), bundle).held_out[: options.tokens]
        where = str(bundle.path / record.NAME)
    if len(ids) < 2:
        raise BadInput(f"{where}: too few tokens to judge by: name a longer text with --data")
    return ids


def write(
    source: Source,
    rounded: Mapping[str, np.ndarray],
    path: Path,
    float_inputs: Collection[str],
    target: Target | None,
    report: Report,
) -> None:
    """Write one INT8 graph, the portable one or a target's, of weights that are rounded already."""
    opset = source.bundle.manifest["opset"] if target is None else target.opset
    graph = qdq.to_int8(
        onnx.ModelProto.FromString(traced(source.config, 20 if opset == 17 else opset)),
        len(STEP_INPUTS) + len(state_specs(source.config)),
        source.weights,
        source.calibration.tensors,
        source.smoothing,
        rounded,
        float_inputs,
        source.halved(float_inputs),
        pairs=target is not None and opset == 17,
    )
    if target is not None and target.runs_plugins:
        embedding.for_tensorrt(graph.model)
    model = ir.serde.deserialize_model(graph.model)
    lowered = (
        lower.portable(model, FORM, opset) if target is None else lower.for_target(model, target)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_model(lowered, graph.weights, path, report=report)
    check_saved(path, opset, functions=target is None or not target.runs_plugins)


@lru_cache(maxsize=2)
def traced(config: ModelConfig, opset: int) -> bytes:
    """The FP32 graph of a model, serialised; its weights are inputs."""
    skeleton = model_skeleton(config, torch.float32, opset)
    hide_layers(skeleton)
    return ir.serde.serialize_model(skeleton.model).SerializeToString()
