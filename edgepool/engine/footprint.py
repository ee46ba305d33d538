"""Bytes that a model takes on a target, by part. docs/plan.md has the formulas.

Everything follows from the configuration, no weight is read. Weights and state are exact, the rest
is an estimate.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Dict, Iterable, List, Tuple

from ..config import ModelConfig, state_specs, weight_shapes
from ..targets import Target
from .memory import GIB

STEP_TOKENS = 512  # new tokens of a prefill step, what build-engine takes by default
WORKSPACE = 64 << 20  # the plugins' own bound; tactics of the linear layers stay below it
PROCESS = GIB // 2  # Python, CUDA context and TensorRT itself
EMBEDDING, HEAD = "embed.weight", "lm_head.weight"

# Their inputs go in as two INT8 halves (`edgepool quantize`): one reading, twice the operations.
HALVED = "down_proj.weight"


@dataclass(frozen=True)
class Precision:
    """itemsize: of the graph's float type; int8: linear layers multiply in INT8, INT8 pages."""

    name: str
    itemsize: int
    int8: bool


@dataclass(frozen=True)
class Memory:
    """Bytes by part. weights by dtype; gathered: of them, a table of which a step reads few rows;
    copies: the second set of pools where state is not in place; file: weights of the ONNX file."""

    weights: Dict[str, int]
    gathered: int
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


def precisions_of(target: Target) -> List[Precision]:
    """The precisions worth comparing: FP16 or INT8 on a GPU, FP32 or INT8 on a CPU."""
    floats = Precision("fp16", 2, False) if target.sm else Precision("fp32", 4, False)
    return [floats, Precision("int8", floats.itemsize, True)]


def memory(
    config: ModelConfig, target: Target, precision: Precision, context: int, batch: int
) -> Memory:
    """Bytes of each part; never less for a longer context or a larger batch."""
    page_count = pages(config, batch, context)
    parts = state_bytes(stored(config, precision), precision.itemsize, batch, page_count)
    weights, gathered = weight_bytes(config, target, precision)
    in_place = target.runs_plugins or not target.sm  # ONNX Runtime binds state to itself
    return Memory(
        weights=weights,
        gathered=gathered,
        copies=0 if in_place else sum(parts.values()),
        activations=activation_bytes(config, target, precision, context, batch),
        workspace=WORKSPACE if target.sm else 0,
        file=file_bytes(config, target, precision),
        **parts,
    )


def stored(config: ModelConfig, precision: Precision) -> ModelConfig:
    """The configuration with the pages of the precision: `edgepool quantize` makes them INT8."""
    return dataclasses.replace(config, kv_dtype="int8") if precision.int8 else config


def pages(config: ModelConfig, batch: int, context: int) -> int:
    """Physical pages, the null page included."""
    return 1 + batch * -(-context // config.page_size)


def state_bytes(config: ModelConfig, itemsize: int, batch: int, page_count: int) -> Dict[str, int]:
    """Bytes of the graph's state by part: kv, index, tail."""
    sizes = {"batch": batch, "pages": page_count}
    found = {"kv": 0, "index": 0, "tail": 0}
    for spec in state_specs(config):
        count = {"float": itemsize, "float32": 4, "int8": 1}[spec.dtype]
        count *= product(sizes[n] if isinstance(n, str) else n for n in spec.shape)
        part = spec.name.split(".")[0]
        found["tail" if part == "tail" else "index" if part.startswith("index") else "kv"] += count
    return found


def state_elements(config: ModelConfig, batch: int, context: int) -> int:
    """Elements of the largest state tensor."""
    sizes = {"batch": batch, "pages": pages(config, batch, context)}
    shapes = (spec.shape for spec in state_specs(config))
    return max(product(sizes[n] if isinstance(n, str) else n for n in shape) for shape in shapes)


def weight_bytes(
    config: ModelConfig, target: Target, precision: Precision
) -> Tuple[Dict[str, int], int]:
    """Bytes of the weights by dtype as the builder stores them, and of the table it gathers from.

    A weight is INT8 where both sides of its product are, and so is an embedding table, with an FP32
    scale per output or row. TensorRT 8 gathers floats, from a second copy of a tied table.
    """
    kind = {2: "fp16", 4: "fp32"}[precision.itemsize]
    found = {"fp32": 0, "fp16": 0, "int8": 0}
    gathered = 0

    def store(shape: Tuple[int, ...], int8: bool) -> int:
        count = product(shape) * (1 if int8 else precision.itemsize)
        scales = 4 * shape[0] if int8 else 0
        found["int8" if int8 else kind] += count
        found["fp32"] += scales
        return count + scales

    for name, shape in weight_shapes(config).items():
        if name != EMBEDDING:
            store(shape, precision.int8 and is_linear(shape))
            continue
        quantised = precision.int8 and not takes_pairs(target)
        gathered = store(shape, quantised)
        if config.tie_embeddings and quantised == precision.int8:
            gathered = 0  # the head reads all of the same table
        elif config.tie_embeddings:
            store(shape, True)
    return {dtype: count for dtype, count in found.items() if count}, gathered


def is_linear(shape: Tuple[int, ...]) -> bool:
    """Whether a weight is a matrix of a linear layer; other weights have one axis or three."""
    return len(shape) == 2


def takes_pairs(target: Target) -> bool:
    """Whether its TensorRT takes INT8 weights only as floats followed by Q and DQ."""
    return target.software.get("tensorrt", "").startswith("8.")


def file_bytes(config: ModelConfig, target: Target, precision: Precision) -> int:
    """Weights in the ONNX file: matrices in INT8, or for TensorRT 8 in FP32, with FP32 scales."""
    total = 0
    for shape in weight_shapes(config).values():
        if precision.int8 and is_linear(shape):
            total += product(shape) * (4 if takes_pairs(target) else 1) + 4 * shape[0]
        else:
            total += product(shape) * (4 if precision.int8 else precision.itemsize)
    return total


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


def product(sizes: Iterable[int]) -> int:
    count = 1
    for n in sizes:
        count *= n
    return count
