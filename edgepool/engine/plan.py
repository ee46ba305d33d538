"""What a model will take and give on a target: bytes by part, and a roofline estimate of its speed.

Everything follows from the configuration, no weight is read. docs/plan.md has the formulas and says
which parts are exact (weights, state) and which are estimates (the rest, and every speed).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Tuple

from ..config import ModelConfig, state_specs, weight_shapes
from ..errors import BadInput
from ..targets import Target
from .memory import GIB, RESERVE

STEP_TOKENS = 512  # new tokens of a prefill step, what build-engine takes by default
WORKSPACE = 64 << 20  # the plugins' own bound; tactics of the linear layers stay below it
PROCESS = GIB // 2  # Python, CUDA context and TensorRT itself
GPU_RESERVE = GIB // 2  # of a GPU with memory of its own: CUDA context and kernels
MOST_BATCH = 4096

# Their inputs have outliers: INT8 activations cost accuracy there, so they stay in float, and a
# TensorRT that multiplies floats stores its weight as floats.
FLOAT_LINEARS = ("down_proj.weight", "embed.weight", "lm_head.weight")


@dataclass(frozen=True)
class Precision:
    """itemsize: of the graph's float type; int8: linear layers multiply in INT8."""

    name: str
    itemsize: int
    int8: bool


@dataclass(frozen=True)
class Memory:
    """Bytes on the target, by part; copies: the second set of pools where state is not in place."""

    weights: Dict[str, int]
    kv: int
    index: int
    tail: int
    copies: int
    activations: int
    workspace: int
    file: int

    @property
    def state(self) -> int:
        return self.kv + self.index + self.tail

    @property
    def engine(self) -> int:
        return sum(self.weights.values())

    @property
    def total(self) -> int:
        """While running."""
        return self.engine + self.state + self.copies + self.activations + self.workspace

    @property
    def build_peak(self) -> int:
        """While building: file and engine twice (parsed and copied, built and serialised)."""
        return 2 * self.file + self.engine + self.total + PROCESS


@dataclass(frozen=True)
class Speed:
    """At most: seconds until the first token of a full prompt, then tokens per second (batch)."""

    prefill_s: float
    decode_tokens_s: float


@dataclass(frozen=True)
class Fit:
    """Of one size of memory: whether the model runs and builds in it, and up to which context."""

    gib: int
    runs: bool
    builds: bool
    largest_context: int


@dataclass(frozen=True)
class Plan:
    """Per precision the memory and fits; speeds by (power mode, attention, precision)."""

    target: str
    context: int
    batch: int
    memory: Dict[str, Memory]
    fits: Dict[str, List[Fit]]
    speeds: Dict[Tuple[str, str, str], Speed]
    copied_per_step: Dict[str, int]

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON types."""
        memory = {
            name: {
                **dataclasses.asdict(m),
                "state": m.state,
                "total": m.total,
                "build_peak": m.build_peak,
            }
            for name, m in self.memory.items()
        }
        speeds = [
            {"mode": mode, "attention": attention, "precision": precision, **vars(speed)}
            for (mode, attention, precision), speed in self.speeds.items()
        ]
        return {
            "target": self.target,
            "context": self.context,
            "batch": self.batch,
            "memory": memory,
            "fits": {name: [dict(vars(f)) for f in fits] for name, fits in self.fits.items()},
            "copied_per_step": self.copied_per_step,
            "speed_estimates": speeds,
        }


def plan(config: ModelConfig, target: Target, context: int, batch: int = 1) -> Plan:
    """Plan `batch` sequences of `context` tokens; raises BadInput for what the model cannot do."""
    if not 1 <= context <= config.max_context:
        raise BadInput(
            "--context %d: choose 1 to %d for this model" % (context, config.max_context)
        )
    if not 1 <= batch <= MOST_BATCH:
        raise BadInput("--batch %d: choose 1 to %d" % (batch, MOST_BATCH))
    precisions = precisions_of(target)
    needs = {p.name: memory(config, target, p, context, batch) for p in precisions}
    return Plan(
        target=target.name,
        context=context,
        batch=batch,
        memory=needs,
        fits={
            p.name: [fit(config, target, p, context, batch, gib) for gib in target.memory_gib]
            for p in precisions
        },
        speeds=speeds(config, target, context, batch),
        copied_per_step={name: need.copies for name, need in needs.items()},
    )


def precisions_of(target: Target) -> List[Precision]:
    """The precisions worth comparing: FP16 or INT8 on a GPU, FP32 or INT8 on a CPU."""
    floats = Precision("fp16", 2, False) if target.sm else Precision("fp32", 4, False)
    return [floats, Precision("int8", floats.itemsize, True)]


# ----------------------------------------------------------------------------------- memory


def memory(
    config: ModelConfig, target: Target, precision: Precision, context: int, batch: int
) -> Memory:
    """Bytes of each part; never less for a longer context or a larger batch."""
    parts = state_bytes(config, precision.itemsize, batch, pages(config, batch, context))
    in_place = target.runs_plugins or not target.sm  # ONNX Runtime binds state to itself
    return Memory(
        weights=weight_bytes(config, precision),
        copies=0 if in_place else sum(parts.values()),
        activations=activation_bytes(config, target, precision, context, batch),
        workspace=WORKSPACE if target.sm else 0,
        file=file_bytes(config, target, precision),
        **parts,
    )


def pages(config: ModelConfig, batch: int, context: int) -> int:
    """Physical pages, the null page included."""
    return 1 + batch * -(-context // config.page_size)


def state_bytes(config: ModelConfig, itemsize: int, batch: int, page_count: int) -> Dict[str, int]:
    """Bytes of the graph's state by part: kv, index, tail."""
    sizes = {"batch": batch, "pages": page_count}
    found = {"kv": 0, "index": 0, "tail": 0}
    for spec in state_specs(config):
        count = {"float": itemsize, "float32": 4, "int8": 1}[spec.dtype]
        for n in spec.shape:
            count *= sizes[n] if isinstance(n, str) else n
        part = spec.name.split(".")[0]
        found["tail" if part == "tail" else "index" if part.startswith("index") else "kv"] += count
    return found


def weight_bytes(config: ModelConfig, precision: Precision) -> Dict[str, int]:
    """Bytes of the weights by dtype, as the builder stores them.

    A weight is INT8 where both sides of its product are; its scales, one per output, are FP32.
    """
    kind = "fp16" if precision.itemsize == 2 else "fp32"
    found = {kind: 0}
    for name, shape in weight_shapes(config).items():
        if precision.int8 and is_int8(name, shape):
            found["int8"] = found.get("int8", 0) + _product(shape)
            found["fp32"] = found.get("fp32", 0) + 4 * shape[0]
        else:
            found[kind] += _product(shape) * precision.itemsize
    return found


def is_int8(name: str, shape: Tuple[int, ...]) -> bool:
    """Whether an INT8 engine multiplies by this weight in INT8."""
    return len(shape) == 2 and name.endswith("proj.weight") and not name.endswith(FLOAT_LINEARS)


def file_bytes(config: ModelConfig, target: Target, precision: Precision) -> int:
    """Weights in the ONNX file; TensorRT 8 takes INT8 as float32 with Q/DQ pairs."""
    version = target.software.get("tensorrt", "10").split(".")[0]
    if precision.int8 and int(version) < 10:
        return 4 * sum(_product(shape) for shape in weight_shapes(config).values())
    return sum(weight_bytes(config, precision).values())


def activation_bytes(
    config: ModelConfig, target: Target, precision: Precision, context: int, batch: int
) -> int:
    """What one layer keeps alive in the largest step, and the logits.

    Function bodies mask the whole product of queries and keys: its scores count, twice.
    """
    c, rows = config, batch * min(STEP_TOKENS, context)
    attention = 2 * c.num_heads * c.head_dim + 2 * c.num_kv_heads * c.head_dim
    width = 2 * c.hidden_size + max(attention, 2 * c.intermediate_size)
    count = rows * width * precision.itemsize + batch * c.vocab_size * 4
    if not target.runs_plugins:
        count += 2 * 4 * rows * c.num_heads * context
    return count


def fit(
    config: ModelConfig, target: Target, precision: Precision, context: int, batch: int, gib: int
) -> Fit:
    """Whether the plan fits in `gib` GiB, less what is left to others."""
    usable = gib * GIB - (RESERVE if target.shared_memory else GPU_RESERVE)

    def runs(tokens: int) -> bool:
        need = memory(config, target, precision, tokens, batch).total
        return need <= usable and state_elements(config, batch, tokens) <= (
            target.tensor_elements or need
        )

    peak = memory(config, target, precision, context, batch).build_peak
    builds = runs(context) and (peak <= usable or not target.shared_memory)
    return Fit(gib, runs(context), builds, largest(runs, config.max_context))


def state_elements(config: ModelConfig, batch: int, context: int) -> int:
    """Elements of the largest state tensor."""
    sizes = {"batch": batch, "pages": pages(config, batch, context)}
    shapes = (spec.shape for spec in state_specs(config))
    return max(_product([sizes[n] if isinstance(n, str) else n for n in shape]) for shape in shapes)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in [0, most] that fits, when every smaller one does too; 0 always fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# ------------------------------------------------------------------------------------ speed


@dataclass(frozen=True)
class Mode:
    """What a GPU gives in a power mode: bytes/s, and multiply-adds x 2 per second."""

    name: str
    bandwidth: float
    fp16: float
    int8: float


def modes_of(target: Target) -> List[Mode]:
    """The power modes whose figures are known, each once; the GPU's own figures without any."""
    if not (target.bandwidth_gb_s and target.fp16_tflops and target.int8_tops):
        return []
    found = [
        Mode(m.name, m.bandwidth_gb_s * 1e9, m.fp16_tflops * 1e12, m.int8_tops * 1e12)
        for m in target.power_modes
        if m.bandwidth_gb_s and m.fp16_tflops and m.int8_tops
    ]
    whole = Mode(
        "all", target.bandwidth_gb_s * 1e9, target.fp16_tflops * 1e12, target.int8_tops * 1e12
    )
    return list(dict.fromkeys(found)) or [whole]


def speeds(
    config: ModelConfig, target: Target, context: int, batch: int
) -> Dict[Tuple[str, str, str], Speed]:
    """Estimates by (mode, `sparse` or `dense`, precision); dense: the model with full layers."""
    variants = {"sparse": config, "dense": dense(config)}
    if variants["dense"].layer_types == config.layer_types:
        del variants["sparse"]
    return {
        (mode.name, kind, precision.name): speed(variant, target, mode, precision, context, batch)
        for mode in modes_of(target)
        for kind, variant in variants.items()
        for precision in precisions_of(target)
    }


def dense(config: ModelConfig) -> ModelConfig:
    """The same model with full attention in every layer, and so without an index."""
    index = dataclasses.replace(config.index, share=())
    full = ("full",) * config.num_layers
    return dataclasses.replace(config, layer_types=full, index=index)


def speed(
    config: ModelConfig, target: Target, mode: Mode, precision: Precision, context: int, batch: int
) -> Speed:
    """Roofline (Williams et al. 2009): a step takes as long as its bytes or its arithmetic."""
    need = memory(config, target, precision, context, batch)
    read = need.engine - (0 if config.tie_embeddings else _embedding(config, precision))
    int8, other = linear_flops(config, precision)
    head = 2 * config.vocab_size * config.hidden_size

    attention, cache = attention_flops(config, context), cache_bytes(config, precision, context)
    bytes_moved = read + batch * cache + 2 * need.copies
    seconds = (batch * int8) / mode.int8 + batch * (other + attention + head) / mode.fp16
    decode = batch / max(bytes_moved / mode.bandwidth, seconds)

    steps = -(-context // STEP_TOKENS)
    whole = attention_sum(config, context)
    seconds = batch * context * int8 / mode.int8
    seconds += batch * (context * other + whole + steps * head) / mode.fp16
    bytes_moved = steps * (read + batch * cache + 2 * need.copies)
    return Speed(max(bytes_moved / mode.bandwidth, seconds), decode)


def _embedding(config: ModelConfig, precision: Precision) -> int:
    """Bytes of an embedding table of which a step reads a few rows only."""
    return config.vocab_size * config.hidden_size * precision.itemsize


def linear_flops(config: ModelConfig, precision: Precision) -> Tuple[int, int]:
    """Operations per token in the linear layers, without the head: in INT8, and in float."""
    int8 = other = 0
    for name, shape in weight_shapes(config).items():
        if len(shape) == 2 and name not in ("embed.weight", "lm_head.weight"):
            if precision.int8 and is_int8(name, shape):
                int8 += 2 * _product(shape)
            else:
                other += 2 * _product(shape)
    return int8, other


def attention_flops(config: ModelConfig, context: int) -> int:
    """Operations of one query at the end of the context: attention, and scoring of the index."""
    return sum(
        _attend(config) * config.attended_tokens(i, context) + _score(config, i) * context
        for i in range(config.num_layers)
    )


def attention_sum(config: ModelConfig, context: int) -> int:
    """The same for every token of a prompt: sum of `attention_flops` over contexts 1 to context."""
    total = 0
    for i in range(config.num_layers):
        most = config.attended_tokens(i, context)  # reached at that context, and kept
        total += _attend(config) * (most * (most + 1) // 2 + (context - most) * most)
        total += _score(config, i) * (context * (context + 1) // 2)
    return total


def _attend(config: ModelConfig) -> int:
    """Operations per query and attended token in one layer: two products."""
    return 4 * config.num_heads * config.head_dim


def _score(config: ModelConfig, layer: int) -> int:
    """Operations per query and token of context to score the layer's index."""
    if not config.selects(layer):
        return 0
    heads, queries, dim = config.index_heads
    return 2 * heads * queries * dim // config.index.ratio


def cache_bytes(config: ModelConfig, precision: Precision, context: int) -> int:
    """Bytes of the cache that one decode step of one sequence reads."""
    int8 = config.kv_dtype == "int8"
    item = 1 if int8 else precision.itemsize
    scale = 4 if int8 else 0
    heads, _, dim = config.index_heads
    total = 0
    for i in range(config.num_layers):
        vectors = 2 * config.num_kv_heads * config.attended_tokens(i, context)
        total += vectors * (config.head_dim * item + scale)
        if config.selects(i):
            total += heads * (context // config.index.ratio) * (dim * item + scale)
    return total


def _product(sizes: Any) -> int:
    count = 1
    for n in sizes:
        count *= n
    return count
