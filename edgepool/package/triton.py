"""A model repository for Triton Inference Server, whose implicit state holds the pools.

    README.md                 what to copy where, how to start the server, a client
    tokenizer.json            for the client
    edgepool/config.pbtxt     tensors, state, instances
    edgepool/1/model.onnx     for Triton's ONNX Runtime; or model.plan, an engine for its TensorRT

Field names are those of Triton's model_config.proto. A sequence has its own pools, so a request is
one sequence (`max_batch_size: 0`: pools have no batch axis).
"""

from __future__ import annotations

import shutil
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .. import files
from ..bundle import Bundle
from ..config import ModelConfig, state_specs
from ..engine import trust
from ..engine.footprint import STEP_TOKENS, product
from ..engine.graphs import flag, graph_name, weights_digest
from ..engine.profiles import Limits
from ..engine.store import ENGINE
from ..engine.usable import engines, runtime_of
from ..errors import BadInput
from ..onnxfile import external_locations
from ..progress import Report, silent
from ..targets import Target
from .extract import check_new

NAME = "edgepool"
CHUNK = 256  # tokens of a step of prefill on ONNX Runtime; an engine has its own limit
# After so long without a request, Triton takes a sequence's instance for another one.
IDLE_MICROSECONDS = 60 * 1000 * 1000
TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int8": "TYPE_INT8"}
BYTES = {"TYPE_FP32": 4, "TYPE_FP16": 2, "TYPE_INT8": 1}


@dataclass(frozen=True)
class Model:
    """What Triton runs. file: None where the engine has still to be built and copied."""

    platform: str
    name: str
    file: Optional[Path]
    precision: str
    chunk: int
    kv_tokens: int


@dataclass(frozen=True)
class State:
    """A pair of state tensors, `name` and `name`_out, of one sequence."""

    name: str
    data_type: str
    dims: Tuple[int, ...]

    @property
    def bytes(self) -> int:
        return BYTES[self.data_type] * product(self.dims)


@dataclass(frozen=True)
class Repository:
    """What was written; state_bytes: what one sequence takes."""

    path: Path
    model: Model
    state_bytes: int


def write_repository(
    bundle: Bundle,
    folder: Path,
    target: Optional[Target] = None,
    kv_tokens: Optional[int] = None,
    report: Report = silent,
) -> Repository:
    """Write a repository into a new folder: for ONNX Runtime, or for the TensorRT of a target.

    kv_tokens: what the pools of a sequence hold; by default the engine's limit, or the context.
    Raises BadInput for a folder that is not empty, a target without plugins, wrong kv_tokens, and a
    bundle that is damaged or has no tokenizer.
    """
    check_new(folder)
    if bundle.tokenizer_path is None:
        raise BadInput("%s: it has no tokenizer.json: export with one" % bundle.path)
    bundle.verify(report)
    if target is None:
        model = onnx_model(bundle, kv_tokens)
    else:
        model = engine_for(bundle, target, kv_tokens)
    limits = Limits(1, model.chunk, model.kv_tokens)
    limits.check(bundle.config)
    states = states_of(bundle, model.precision, limits.pages(bundle.config))
    with files.new_folder(folder) as staged:
        version = staged / NAME / "1"
        version.mkdir(parents=True)
        text = config_text(bundle.config, model, states)
        (staged / NAME / "config.pbtxt").write_text(text, encoding="utf-8")
        (staged / "README.md").write_text(readme(bundle, target, model, states), encoding="utf-8")
        shutil.copyfile(str(bundle.tokenizer_path), str(staged / "tokenizer.json"))
        if model.file is not None:
            copy_model(model.file, version / model.name, report)
    return Repository(folder, model, sum(state.bytes for state in states))


def onnx_model(bundle: Bundle, kv_tokens: Optional[int]) -> Model:
    """The portable graph, which Triton's ONNX Runtime executes without a plugin."""
    context = bundle.config.max_context
    chunk, dtype = min(CHUNK, context), str(bundle.manifest["dtype"])
    tokens = context if kv_tokens is None else kv_tokens
    return Model("onnxruntime_onnx", "model.onnx", bundle.model_path, dtype, chunk, tokens)


def engine_for(bundle: Bundle, target: Target, kv_tokens: Optional[int]) -> Model:
    """The fastest engine that this user built from the bundle for a target; its file is None
    without one.

    An engine for a batch, or for other kv_tokens, does not count, nor does one that somebody else
    built: an engine is code, and Triton would run it.
    """
    if not target.runs_plugins:
        raise BadInput("%s runs no engine with plugins: leave out --target" % target.name)
    for root, name, record in engines(bundle):
        limits = record["key"].get("profiles", {})
        fits = limits.get("batch") == 1 and kv_tokens in (None, limits.get("kv_tokens"))
        ours = record["target"] == target.name and runtime_of(record) == "tensorrt"
        engine = root / name / ENGINE
        if fits and ours and is_trusted(bundle, target, engine, record):
            return Model(
                "tensorrt_plan",
                "model.plan",
                engine,
                str(record["key"]["precision"]),
                int(limits["input_len"]),
                int(limits["kv_tokens"]),
            )
    context = bundle.config.max_context
    chunk = min(STEP_TOKENS, context)
    dtype = str(bundle.manifest["dtype"])
    tokens = context if kv_tokens is None else kv_tokens
    return Model("tensorrt_plan", "model.plan", None, dtype, chunk, tokens)


def is_trusted(bundle: Bundle, target: Target, engine: Path, record: Dict[str, Any]) -> bool:
    """Whether an engine was built by this user, from the weights that the bundle has now."""
    name = graph_name(bundle, target, record["key"]["precision"], "tensorrt")
    if name not in bundle.manifest["files"]:
        return False
    same = record["key"].get("weights") == weights_digest(bundle, name)
    return same and files.sha256(engine) == record["sha256"] in trust.built_here()


def states_of(bundle: Bundle, precision: str, pages: int) -> List[State]:
    """The state tensors of one sequence, with pools of so many pages."""
    sizes = {"batch": 1, "pages": pages}
    own = "float16" if "fp16" in (precision, bundle.manifest["dtype"]) else "float32"
    return [
        State(
            spec.name,
            TYPES[own if spec.dtype == "float" else spec.dtype],
            tuple(sizes[size] if isinstance(size, str) else size for size in spec.shape),
        )
        for spec in state_specs(bundle.config_of(precision))
    ]


def copy_model(source: Path, place: Path, report: Report) -> None:
    """Copy an ONNX file with its external data, or an engine."""
    names = external_locations(str(source)) if source.suffix == ".onnx" else set()
    pairs = [(source, place), *((source.parent / n, place.parent / n) for n in sorted(names))]
    for done, (original, copy) in enumerate(pairs):
        report("copying the model", done, len(pairs))
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(original), str(copy))
    report("copying the model", len(pairs), len(pairs))


# ------------------------------------------------------------------------------- config.pbtxt


def config_text(config: ModelConfig, model: Model, states: Sequence[State]) -> str:
    """config.pbtxt, in protobuf's text format."""
    inputs = [
        ("input_ids", [1, -1]),
        ("page_table", [1, -1]),
        ("past_len", [1]),
        ("new_len", [1]),
        ("logit_rows", [1, -1]),
    ]
    group = "kind: KIND_AUTO"
    if model.name == "model.plan":
        group = 'kind: KIND_GPU profile: ["0", "1"]'  # decode and prefill: Triton takes what fits
    lines = [
        'name: "%s"' % NAME,
        'platform: "%s"' % model.platform,
        "max_batch_size: 0",
        *('input { name: "%s" data_type: TYPE_INT32 dims: %s }' % pair for pair in inputs),
        'output { name: "logits" data_type: TYPE_FP32 dims: [1, -1, %d] }' % config.vocab_size,
        "# As many sequences at once as there are instances; each takes the pools.",
        "instance_group { count: 1 %s }" % group,
        "sequence_batching {",
        "  max_sequence_idle_microseconds: %d" % IDLE_MICROSECONDS,
        "  direct { }",
        "  # Without one buffer for both, Triton pairs inputs and outputs by the order of their",
        "  # names, in which k_pool.10 is before k_pool.1_out and after k_pool.1.",
        *(state_text(state) for state in states),
        "}",
    ]
    return "\n".join(lines) + "\n"


def state_text(state: State) -> str:
    dims = list(state.dims)
    return (
        '  state {{ input_name: "{0}" output_name: "{0}_out" data_type: {1} dims: {2}\n'
        "    use_same_buffer_for_input_output: true\n"
        '    initial_state {{ name: "zeros" data_type: {1} dims: {2} zero_data: true }} }}'
    ).format(state.name, state.data_type, dims)


def readme(bundle: Bundle, target: Optional[Target], model: Model, states: Sequence[State]) -> str:
    """README.md of the repository."""
    config = bundle.config
    template = string.Template(Path(__file__).with_name("triton.md").read_text(encoding="utf-8"))
    engine = string.Template(ENGINE_TEXT).substitute(
        target=target.name if target else "",
        flag=flag(bundle, model.precision),
        precision=model.precision,
        kv_tokens=model.kv_tokens,
        there="It is there." if model.file else "It is not there yet.",
    )
    return template.substitute(
        engine=engine if target is not None else "",
        start=START_TENSORRT if target is not None else START_ONNX,
        mib="%.1f" % (sum(state.bytes for state in states) / (1 << 20)),
        kv_tokens=model.kv_tokens,
        page=config.page_size,
        chunk=model.chunk,
        ends=list(config.eos_token_ids or ()),
    )


START_ONNX = """\
    tritonserver --model-repository=$PWD
"""
START_TENSORRT = """\
    EDGEPOOL_REGISTER_PLUGINS=1 tritonserver --model-repository=$PWD \\
        --backend-config=tensorrt,plugins=/plugins/libedgepool_plugins.so

The library is the one that `edgepool build-plugins` makes on a machine with that TensorRT. Triton
only opens it; the variable makes it register its operators when it is opened.
"""
ENGINE_TEXT = """\
## The engine

`edgepool/1/model.plan` is an engine of TensorRT. $there An engine runs on the TensorRT and the kind
of GPU that built it, so build it in an image of the same release as Triton's:

    edgepool build-engine BUNDLE --target $target$flag --max-kv-tokens $kv_tokens
    cp BUNDLE/engines/$target-$precision/engine edgepool/1/model.plan

"""
