"""Rules about element types: what a parser narrows, and what a GPU does not compute."""

from __future__ import annotations

from typing import Dict, Iterator, List, Tuple

from .graph import Model, Scope, type_name
from .quantization_rules import QDQ
from .reader import Reader
from .rules import ERROR, WARNING, Places, rule

INT32 = -(1 << 31), (1 << 31) - 1
NEVER = "INT16 UINT16 UINT32 UINT64 STRING COMPLEX64 COMPLEX128 FLOAT8E4M3FNUZ FLOAT8E5M2 " + (
    "FLOAT8E5M2FNUZ UINT4 UINT2 INT2"
)


def typed(model: Model) -> Iterator[Tuple[str, str, str]]:
    """(where, dtype, role) of all that brings a type into the graph.

    role: `constant`, `input or output` of the graph, or `cast`. Other nodes only pass types on.
    """
    for _, tensor in model.tensors():
        yield tensor.name, tensor.dtype, "constant"
    for value in model.main.inputs + model.main.outputs:
        yield value.name, value.dtype, "input or output"
    for node in model.nodes("Cast"):
        yield node.where, type_name(node.get("to", 0)), "cast"


@rule(
    "EP020",
    WARNING,
    "double",
    "export in float32: the parser clamps to its range",
)
def double(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for where, dtype, role in typed(model):
        if dtype == "DOUBLE":
            yield where, "%s in DOUBLE: computed in FLOAT" % role


@rule(
    "EP021",
    ERROR,
    "INT64 constant beyond 32 bits",
    "use numbers of 32 bits (masks of -2^31 instead of -2^63)",
)
def wide_int64(model: Model, reader: Reader) -> Places:
    if not reader.before(9):
        return
    bounds = _slice_bounds(model)
    for scope, tensor in model.tensors():
        if tensor.dtype != "INT64" or (scope, tensor.name) in bounds:
            continue
        values = tensor.values()
        if values is not None and values.size:
            low, high = int(values.min()), int(values.max())
            if low < INT32[0] or high > INT32[1]:
                worst = low if low < INT32[0] else high
                yield tensor.name, "%d is clamped to 32 bits by %s" % (worst, reader.name)


def _slice_bounds(model: Model) -> Dict[Tuple[Scope, str], bool]:
    """Constants that are only starts and ends of slices, where clamping changes nothing."""
    only: Dict[Tuple[Scope, str], bool] = {}
    for node in model.nodes():
        for i, name in enumerate(node.inputs):
            owner = node.scope.owner(name) if name else None
            if owner is not None:
                bound = node.op_type == "Slice" and node.is_standard and i in (1, 2)
                only[owner, name] = only.get((owner, name), True) and bound
    return {key: True for key, bound in only.items() if bound}


@rule(
    "EP022",
    WARNING,
    "INT64 input or output",
    "make it INT32 in the model, or bind buffers of INT32",
)
def int64_binding(model: Model, reader: Reader) -> Places:
    if not reader.before(9):
        return
    for where, dtype, role in typed(model):
        if dtype == "INT64" and role == "input or output":
            yield where, "%s makes it INT32: buffers of INT64 would be misread" % reader.name


@rule(
    "EP023",
    ERROR,
    "BF16 that the target does not have",
    "export with --dtype fp16 or fp32",
)
def bf16(model: Model, reader: Reader) -> Places:
    if not reader.parses or not (reader.before(9) or "bf16" not in reader.target.precisions):
        return
    for where, dtype, role in typed(model):
        if dtype == "BFLOAT16":
            yield where, "%s in BF16 on %s" % (role, reader.target.title)


@rule(
    "EP024",
    ERROR,
    "FP8 or FP4 that the GPU does not have",
    "quantise to INT8",
)
def fp8(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    needs = {"FLOAT8E4M3FN": ("fp8", 9), "FLOAT4E2M1": ("fp4", 10)}
    for where, dtype, role in typed(model):
        if dtype in needs:
            precision, since = needs[dtype]
            if precision not in reader.target.precisions or reader.before(since):
                yield where, "%s in %s on %s" % (role, precision.upper(), reader.target.title)


@rule(
    "EP025",
    ERROR,
    "type that TensorRT does not have",
    "cast to INT32, FLOAT or BOOL when exporting",
)
def foreign_type(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    never: List[str] = NEVER.split() + (["INT4"] if reader.before(10) else [])
    quantized = {(n.scope.owner(x), x) for n in model.nodes(*QDQ) for x in (n.input(0), n.input(2))}
    for scope, tensor in model.tensors():  # UINT8 is a type of inputs and outputs only
        foreign = tensor.dtype in never or tensor.dtype == "UINT8"
        if foreign and (scope, tensor.name) not in quantized:  # EP012
            yield tensor.name, "constant in %s" % tensor.dtype
    for where, dtype, role in typed(model):
        if role != "constant" and dtype in never:
            yield where, "%s in %s" % (role, dtype)
