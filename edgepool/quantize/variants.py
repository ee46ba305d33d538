"""Graphs that a bundle was not exported with, from its model.onnx: a target's, in INT8, in FP16.

The first two are what `edgepool export --target` and `edgepool quantize` would have written. All
are held against PyTorch as there. The bundle is replaced as a whole (`amend`), or stays as it was.

    model.fp16.onnx, variants/TARGET/model.fp16.onnx    weights, activations, KV pages in FP16
    fp16.json    {"model": sha256 of model.onnx, "gate": {..}, "overflows": {node: largest |value|}}
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from ..bundle import GRAPHS, Bundle
from ..checkpoint import Checkpoint
from ..errors import BadInput
from ..exporter import by_layer, lower, parity
from ..exporter.export import (
    DTYPES,
    FORM,
    check_saved,
    check_space,
    hide_layers,
    write_variant,
)
from ..exporter.probe import read_graph
from ..exporter.prove import proved_by_layer
from ..exporter.stamp import model_skeleton
from ..exporter.weights import Weight, write_model
from ..model import Model
from ..progress import Report, silent
from ..targets import Target
from . import record
from .amend import amended
from .islands import keep_wide
from .linears import groups
from .qdq import Computed
from .quantize import NAME, Options, judge_fp16, write
from .source import prepare
from .stored import StoredWeights

FP16, FP16_RECORD = GRAPHS["fp16"], "fp16.json"


def add_target(path: Path, target: Target, report: Report = silent) -> Bundle:
    """Add variants/TARGET/model.onnx to the bundle at `path`, in the bundle's own float type.

    Raises GateFailed for a graph that is not equal to PyTorch, BadInput for a model.onnx that lacks
    a weight and a disk that is full.
    """
    bundle = Bundle.open(path)
    dtype, opset = bundle.manifest["dtype"], bundle.manifest["opset"]
    stored = StoredWeights.of(bundle.model_path)
    report("lowering the graph", 0, 1)
    skeleton = model_skeleton(bundle.config, DTYPES[dtype], opset)
    hide_layers(skeleton)
    report("lowering the graph", 1, 1)
    weights = stored_weights({v.name: int(v.dtype) for v in skeleton.weights}, stored)
    with amended(bundle) as (folder, manifest):
        check_space(folder, weights, 1)
        # What stands there is in no manifest: `staged` replaces the folders that are derived.
        shutil.rmtree(folder / "variants" / target.name, ignore_errors=True)
        entry = write_variant(skeleton, weights, folder, target, opset, report)
        outcome = proved(folder / entry["model"], checkpoint_of(bundle, stored), dtype, report)
        manifest["variants"] = {**manifest["variants"], target.name: entry}
        manifest["parity"] = {**(manifest["parity"] or {}), entry["model"]: outcome}
    return Bundle.open(path)


def add_int8(path: Path, target: Target, report: Report = silent) -> Bundle:
    """Add the target's form of the bundle's model.int8.onnx, with what that was made with."""
    bundle = Bundle.open(path)
    made = bundle.manifest["quantization"]
    source = prepare(bundle, made["alpha"], made["kv_dtype"] == "int8")
    stored = StoredWeights.of(bundle.file(made["model"]))
    linears = [linear for group in source.groups for linear in group.linears]
    rounded = {linear.weight: stored.read(linear.weight) for linear in linears}
    place = f"variants/{target.name}/{NAME}"
    with amended(bundle) as (folder, manifest):
        write(source, rounded, folder / place, made["float_inputs"], target, report)
        variants = {**made["variants"], target.name: place}
        manifest["quantization"] = {**made, "variants": variants}
    return Bundle.open(path)


def add_fp16(path: Path, target: Target | None = None, report: Report = silent) -> Bundle:
    """Add the FP16 graph of an FP32 bundle, the portable one or a target's, whose variant is there.

    What FP16 cannot hold, `fp16.judge` finds on the text that calibration held out; those nodes
    stay FP32 (`islands`). Raises GateFailed where FP16 costs too much, and for what cannot stay.
    """
    bundle = Bundle.open(path)
    judged = read_fp16(bundle)
    if judged is None:
        outcome = judge_fp16(path, Options(), report)
        judged = {
            "model": record.model_digest(bundle),
            "gate": outcome["gate"],
            "overflows": outcome["overflows"],
        }
    stored = StoredWeights.of(bundle.model_path)
    opset = bundle.manifest["opset"] if target is None else target.opset
    report("tracing the model in FP16", 0, 1)
    skeleton = model_skeleton(bundle.config, torch.float16, max(opset, 20))
    hide_layers(skeleton)
    model = ir.serde.serialize_model(skeleton.model)
    keep_wide(model, judged["overflows"])
    report("tracing the model in FP16", 1, 1)
    wanted = {v.name: v.type.tensor_type.elem_type for v in model.graph.input[skeleton.inputs :]}
    weights = stored_weights(wanted, stored)
    wide = ir.serde.deserialize_model(model)
    lowered = (
        lower.portable(wide, FORM, opset) if target is None else lower.for_target(wide, target)
    )
    place = FP16 if target is None else f"variants/{target.name}/{FP16}"
    old = [
        name for name in bundle.manifest["files"] if name in (FP16_RECORD, place, f"{place}.data")
    ]
    with amended(bundle, without=tuple(old)) as (folder, manifest):
        check_space(folder, weights, 1)
        write_model(lowered, weights, folder / place, report)
        check_saved(folder / place, opset, functions=target is None or not target.runs_plugins)
        outcome = proved(folder / place, checkpoint_of(bundle, stored), "fp16", report)
        manifest["parity"] = {**(manifest["parity"] or {}), place: outcome}
        text = json.dumps(judged, indent=1, ensure_ascii=False)
        (folder / FP16_RECORD).write_text(text + "\n", encoding="utf-8")
    return Bundle.open(path)


def read_fp16(bundle: Bundle) -> dict[str, Any] | None:
    """What was found when FP16 was judged; None where that was not done, or for another model."""
    if FP16_RECORD not in bundle.manifest["files"]:
        return None
    try:
        judged = json.loads(bundle.file(FP16_RECORD).read_text(encoding="utf-8"))
        return dict(judged) if judged["model"] == record.model_digest(bundle) else None
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{bundle.path / FP16_RECORD}: damaged: export the bundle anew") from error


def stored_weights(wanted: Mapping[str, int], stored: StoredWeights) -> list[Weight]:
    """The weights of a traced graph, by name its types, from a file, in the file's order."""
    missing = sorted(set(wanted) - set(stored.tensors))
    if missing:
        raise BadInput(f"{stored.folder}: model.onnx has no weight '{missing[0]}': export it again")
    return [
        Computed(
            name,
            tuple(tensor.dims),
            wanted[name],
            torch.empty(0),
            False,
            partial(_read, stored, name, wanted[name]),
        )
        for name, tensor in stored.tensors.items()
        if name in wanted
    ]


def _read(stored: StoredWeights, name: str, dtype: int) -> np.ndarray:
    return stored.read(name).astype(onnx.helper.tensor_dtype_to_np_dtype(dtype), copy=False)


def checkpoint_of(bundle: Bundle, stored: StoredWeights) -> Checkpoint:
    """The model that a bundle was exported from, with the weights of its graph, mapped."""
    linears = [linear for group in groups(stored.graph) for linear in group.linears]
    turned_back = {linear.weight for linear in linears if not linear.turned}
    with torch.device("meta"):
        names = [name for name, _ in Model(bundle.config).named_parameters()]
    weights = {}
    for name in names:
        array = stored.read(name)
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        weights[name] = tensor.t() if name in turned_back else tensor
    return Checkpoint(bundle.model_path, bundle.config, weights, None)


def proved(path: Path, checkpoint: Checkpoint, dtype: str, report: Report) -> dict[str, Any]:
    """Compare a written graph with PyTorch, as export does; raises GateFailed where they differ."""
    graph = lower.runnable(read_graph(path))
    schedule = by_layer.short_plan(checkpoint.config, [])
    if proved_by_layer(checkpoint):
        outcome = by_layer.compare(graph, path.parent, checkpoint, schedule, dtype, report)
    else:
        steps = parity.steps_of(Model.from_checkpoint(checkpoint), schedule)
        outcome = parity.compare(graph, path.parent, steps, dtype, report)
    outcome.require(path.name)
    return outcome.to_dict()
