"""`edgepool calibrate`: the ranges of every linear layer's input, measured with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ..bundle import Bundle
from ..config import suggest
from ..errors import BadInput, GateFailed
from ..exporter.lower import runnable
from ..exporter.probe import read_graph, watch
from ..progress import Report, silent
from . import data, record
from .amend import amended
from .inputs import LinearInputs
from .linears import Group, groups
from .ranges import Extremes, Histogram
from .record import Calibration
from .rotation import RotatedWeights
from .runner import Stepper, open_graph
from .smooth import Activations, smoothing


@dataclass(frozen=True)
class Options:
    """What the user chose. samples and length are sequences and tokens of each; None: a default."""

    files: Sequence[Path] = ()
    samples: int | None = None
    length: int | None = None
    method: str = "minmax"


def calibrate(path: Path, options: Options, report: Report = silent) -> Calibration:
    """Calibrate the bundle at `path` and store calibration.json in it.

    Raises BadInput for data or a bundle that cannot be used, and GateFailed, naming the node, where
    a value is NaN or infinite; then the bundle is as it was.
    """
    bundle = Bundle.open(path)
    check(bundle, options)
    result = measure(bundle, options, report)
    with amended(bundle, without=(record.NAME,)) as (folder, _):
        (folder / record.NAME).write_text(result.to_json(), encoding="utf-8")
    return record.with_digest(result)


def check(bundle: Bundle, options: Options) -> None:
    if options.method not in record.METHODS:
        raise BadInput(
            f"method '{options.method}': choose one of {', '.join(record.METHODS)}"
            + suggest(options.method, record.METHODS)
        )
    for name, value in (("samples", options.samples), ("length", options.length)):
        if value is not None and value < 1:
            raise BadInput(f"--{name} {value}: take at least 1")
    if bundle.manifest["dtype"] != "fp32":
        raise BadInput(
            f"{bundle.path}: an {bundle.manifest['dtype']} bundle: "
            "INT8 is made from an FP32 one: export with --dtype fp32"
        )


def measure(bundle: Bundle, options: Options, report: Report) -> Calibration:
    """Run the data through the portable graph; memory does not depend on how much there is."""
    weights = RotatedWeights.of(bundle)
    found = groups(weights.stored.graph)
    source = gather(bundle, options, report)
    inputs = LinearInputs(bundle, weights.rotation, found)
    extremes: dict[str, Extremes] = {}

    def observe(group: Group, values: np.ndarray, stepper: Stepper) -> None:
        if group.name not in extremes:
            extremes[group.name] = Extremes(values.shape[-1])
        if not extremes[group.name].add(values):
            raise GateFailed(first_bad_node(bundle, stepper.feeds))

    def run(see: Callable[[Group, np.ndarray, Stepper], None], what: str) -> None:
        done, total = 0, sum(map(len, source.sequences))
        for sequence in source.sequences:
            for stepper, values in inputs.steps(sequence):
                for group in found:
                    see(group, values[group.name], stepper)
                report(what, done + int(stepper.past[0]), total)
            done += len(sequence)

    run(observe, "measuring ranges")
    limits: dict[str, float] = {}
    if options.method != "minmax":
        limits = clipped(weights, found, extremes, options.method, run)
    return Calibration(
        model=record.model_digest(bundle),
        method=options.method,
        data=source.source,
        sample=source.sample(),
        held_out=source.held_out,
        tensors={
            name: record.Tensor(
                float(seen.lowest.min()),
                float(seen.highest.max()),
                seen.channels,
                seen.mean_squares.astype(np.float32),
                limits.get(name),
            )
            for name, seen in extremes.items()
        },
    )


def gather(bundle: Bundle, options: Options, report: Report) -> data.Data:
    """The data that the options name, or what the model writes."""
    config = bundle.config
    if options.files:
        encode = None
        if bundle.tokenizer_path is not None:
            encode = encoder(bundle.tokenizer_path)
        count, length = options.samples or data.SAMPLES, options.length or data.LENGTH
        return data.from_files(options.files, encode, config, count, length)
    count, length = options.samples or data.OWN_SAMPLES, options.length or data.OWN_LENGTH
    session = open_graph(runnable(read_graph(bundle.model_path)), bundle.path)
    return data.from_model(session, config, count, length, report)


def encoder(path: Path) -> data.Encode:
    """A function from text to token ids; raises BadInput for a file that is no tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise BadInput(f"{path}: not a tokenizer.json that can be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def clipped(
    weights: RotatedWeights,
    found: Sequence[Group],
    extremes: dict[str, Extremes],
    method: str,
    run: Callable[[Callable[[Group, np.ndarray, Stepper], None], str], None],
) -> dict[str, float]:
    """Thresholds of the activations after SmoothQuant, from a second pass with fixed histograms."""
    channels = {name: seen.channels for name, seen in extremes.items()}
    squares = {name: seen.mean_squares for name, seen in extremes.items()}
    scales = smoothing(weights.config, found, Activations(channels, squares), weights.read).groups
    histograms = {}
    for name, amax in channels.items():
        scale = scales.get(name, np.ones_like(amax))
        histograms[name] = Histogram(scale, float((amax / scale).max()) or 1.0)
    run(lambda group, values, _: histograms[group.name].add(values), f"counting for {method}")
    return {
        name: h.entropy() if method == "entropy" else h.percentile()
        for name, h in histograms.items()
    }


def first_bad_node(bundle: Bundle, feeds: dict[str, Any]) -> str:
    """Run one step again with every value visible; says which node first gives NaN or infinity."""
    graph = runnable(read_graph(bundle.model_path))
    known = {v.name for v in graph.graph.value_info}
    floats = {
        v.name
        for v in graph.graph.value_info
        if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    order = [name for node in graph.graph.node for name in node.output if name in floats & known]
    watch(graph, order)
    session = open_graph(graph, bundle.path)
    inputs = {value.name for value in session.get_inputs()}
    values = session.run(order, {name: x for name, x in feeds.items() if name in inputs})
    producer = {name: node.name for node in graph.graph.node for name in node.output}
    bad = next(n for n, x in zip(order, values) if not np.isfinite(x).all())
    at = int(feeds["past_len"][0])
    return (
        f"{bundle.model_path}: node '{producer[bad]}' gives NaN or infinity in the step after "
        f"{at} tokens: the model cannot be calibrated; check its weights with `edgepool verify`"
    )
