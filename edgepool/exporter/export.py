"""`edgepool export`: a model.pt becomes a bundle, and the bundle is proved equal to PyTorch."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__, bundle
from ..bundle import Bundle
from ..checkpoint import load
from ..config import ModelConfig
from ..errors import BadInput, GateFailed
from ..progress import Report, silent
from ..targets import Target, find_targets
from . import lower
from .graph import OPSET
from .probe import read_graph
from .prove import prove
from .simplify import Skeleton
from .stamp import model_skeleton
from .weights import Weight, release, weights_of, write_model

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
OPSETS = (20, 21, 22)
FORM = "auto"


@dataclass(frozen=True)
class Options:
    """What the user chose; the defaults are those of `edgepool export model.pt`."""

    output: Path = Path(bundle.DEFAULT)
    targets: Sequence[str] = ()
    max_context: int | None = None
    dtype: str = "fp32"
    opset: int = OPSET


def export(path: Path, options: Options, report: Report = silent) -> Bundle:
    """Export the `model.pt` at `path` to a bundle at options.output, and prove it equal to PyTorch.

    Raises BadInput for a file or an option that cannot be used, and GateFailed when ONNX Runtime
    does not compute what PyTorch does; then nothing is left behind.
    """
    targets = find_targets(list(options.targets))
    check_options(options)
    checkpoint = load(path)
    config = with_context(checkpoint.config, options.max_context)
    with bundle.staged(options.output) as folder:
        report("tracing the model", 0, 1)
        skeleton = model_skeleton(config, DTYPES[options.dtype], options.opset)
        hide_layers(skeleton)
        report("tracing the model", 1, 1)
        weights = weights_of(skeleton, checkpoint.weights)
        written = [target for target in targets if not is_portable(target, options.opset)]
        check_space(folder, weights, 1 + len(written))

        portable = lower.portable(skeleton.model, FORM, options.opset)
        write_model(portable, weights, folder / "model.onnx", report)
        check_saved(folder / "model.onnx", options.opset, functions=True)
        variants = {
            t.name: write_variant(skeleton, weights, folder, t, options.opset, report)
            for t in targets
        }
        if checkpoint.tokenizer is not None:
            (folder / "tokenizer.json").write_text(checkpoint.tokenizer, encoding="utf-8")

        for tensor in checkpoint.weights.values():
            release(tensor)
        del skeleton, weights, portable
        gc.collect()
        outcome = prove(folder, checkpoint, config, variants, options.dtype, report)
        bundle.write_manifest(
            folder,
            {
                "format": bundle.FORMAT,
                "version": bundle.VERSION,
                "edgepool": __version__,
                "config": config.to_dict(),
                "source_digest": checkpoint.source,
                "opset": options.opset,
                "dtype": options.dtype,
                "functions": FORM,
                "variants": variants,
                "quantization": None,
                "reference": "reference.json",
                "parity": outcome,
            },
        )
    return Bundle.open(options.output)


def check_options(options: Options) -> None:
    if options.dtype not in DTYPES:
        raise BadInput(f"dtype '{options.dtype}': choose one of {', '.join(DTYPES)}")
    if options.opset not in OPSETS:
        raise BadInput(
            f"opset {options.opset}: choose one of {', '.join(map(str, OPSETS))} "
            "(opset 17 is what --target jetson-agx-xavier writes)"
        )


def with_context(config: ModelConfig, max_context: int | None) -> ModelConfig:
    """The configuration with a shorter context; raises BadInput for one beyond the model's."""
    if max_context is None:
        return config
    if not 1 <= max_context <= config.max_context:
        raise BadInput(
            f"--max-context {max_context}: the model's context is {config.max_context} tokens; "
            "choose at most that"
        )
    return dataclasses.replace(config, max_context=max_context)


def check_space(folder: Path, weights: Sequence[Weight], copies: int) -> None:
    """Raise BadInput when the disk cannot hold the graphs' weights."""
    needed = sum(weight.nbytes for weight in weights) * copies
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BadInput(
            f"{folder.parent}: the bundle needs {needed / 1e9:.1f} GB and the disk has "
            f"{free / 1e9:.1f} GB free: free some, or choose another --output"
        )


def hide_layers(skeleton: Skeleton) -> None:
    """Drop the outputs `hidden.I`; the values keep their names, for `probe.watch`."""
    outputs = skeleton.model.graph.outputs
    outputs[:] = [value for value in outputs if not value.name.startswith("hidden.")]


def is_portable(target: Target, opset: int) -> bool:
    """Whether a target runs model.onnx itself, which is written with this opset."""
    return target.functions == FORM and target.opset == opset


def write_variant(
    skeleton: Skeleton,
    weights: Sequence[Weight],
    folder: Path,
    target: Target,
    opset: int,
    report: Report,
) -> dict[str, Any]:
    """Write variants/TARGET/model.onnx; returns its record for the manifest.

    The folder holds all that the target needs, weights included, so that it can be copied alone.
    For a target that runs the portable graph, whose opset is given, that is the variant.
    """
    record = {"opset": target.opset, "ir_version": target.ir_version, "functions": target.functions}
    if is_portable(target, opset):
        return {"model": "model.onnx", **record}
    model = lower.for_target(skeleton.model, target)
    path = folder / "variants" / target.name / "model.onnx"
    path.parent.mkdir(parents=True)
    write_model(model, weights, path, report, twin=folder / "model.onnx")
    check_saved(path, target.opset, functions=not target.runs_plugins)
    return {"model": f"variants/{target.name}/model.onnx", **record}


def check_saved(path: Path, opset: int, functions: bool) -> None:
    """Read a written file again and raise GateFailed unless it is what it was meant to be."""
    saved = read_graph(path)
    versions = {entry.domain: entry.version for entry in saved.opset_import}
    if versions.get("") != opset or saved.ir_version != lower.IR_VERSIONS[opset]:
        raise GateFailed(f"{path.name}: saved with opset {versions.get('')}, meant {opset}")
    if bool(saved.functions) != functions:
        raise GateFailed(f"{path.name}: saved with {len(saved.functions)} functions")
