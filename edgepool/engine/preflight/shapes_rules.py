"""Rules about sizes, control flow, and shapes that are known only while running."""

from __future__ import annotations

from typing import List, Set, Tuple

from .graph import Model, Node, Scope
from .reader import Reader
from .rules import ERROR, WARNING, Places, rule


@rule(
    "EP030",
    ERROR,
    "K of TopK is not a constant",
    "fix K at export, and pad the scores so that there are always K of them",
)
def top_k_not_constant(model: Model, reader: Reader) -> Places:
    if not reader.before(8, 6):
        return
    for node in model.nodes("TopK"):
        if node.input(1) and node.scope.constant(node.input(1)) is None:
            yield node.where, "K is computed; %s takes a constant" % reader.name


@rule(
    "EP031",
    ERROR,
    "K of TopK is too large",
    "select fewer, or larger blocks (import --budget)",
)
def top_k_too_large(model: Model, reader: Reader) -> Places:
    limit = reader.target.top_k
    if limit is None or not reader.parses:
        return
    for node in model.nodes("TopK"):
        constant = node.scope.constant(node.input(1))
        values = constant.values() if constant is not None else None
        k = int(values[0]) if values is not None and values.size else node.get("k", 0)
        if k > limit:
            yield node.where, "K is %d; %s takes at most %d" % (k, reader.name, limit)


@rule(
    "EP032",
    ERROR,
    "tensor of 2^31 elements or more",
    "split the tensor; for a KV pool, use fewer pages",
)
def too_many_elements(model: Model, reader: Reader) -> Places:
    limit = reader.target.tensor_elements
    if limit is None or not reader.parses:
        return
    shapes: List[Tuple[str, Tuple[object, ...]]] = [(t.name, t.dims) for _, t in model.tensors()]
    for scope in model.scopes:
        declared = (v for v in scope.declared.values() if v.name not in scope.initializers)
        shapes += [(value.name, value.dims) for value in declared if value.dims is not None]
    for name, dims in shapes:
        count = 1
        for size in dims:
            count *= size if isinstance(size, int) else 1  # a dynamic size is at least 1
        if count > limit:
            yield name, "%d elements; %s takes at most %d" % (count, reader.name, limit)


@rule(
    "EP040",
    ERROR,
    "branches of If whose outputs share a name",
    "rename the outputs of one branch",
)
def branch_names(model: Model, reader: Reader) -> Places:
    if reader.kind != "tensorrt":
        return
    for node, one, other in _branches(model):
        shared = {v.name for v in one.outputs} & {v.name for v in other.outputs}
        if shared:
            yield node.where, "both branches end in '%s'" % sorted(shared)[0]


@rule(
    "EP041",
    ERROR,
    "branches of If with outputs of other ranks",
    "reshape the outputs to one rank inside the branches",
)
def branch_ranks(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for node, one, other in _branches(model):
        for a, b in zip(one.outputs, other.outputs):
            if a.dims is not None and b.dims is not None and len(a.dims) != len(b.dims):
                text = "'%s' has %d axes, '%s' has %d"
                yield node.where, text % (a.name, len(a.dims), b.name, len(b.dims))


def _branches(model: Model) -> List[Tuple[Node, Scope, Scope]]:
    """Every If with both of its branches."""
    found = []
    for node in model.nodes("If"):
        branches = node.graphs("then_branch") + node.graphs("else_branch")
        if len(branches) == 2:
            found.append((node, branches[0], branches[1]))
    return found


@rule(
    "EP042",
    ERROR,
    "scan output of a Loop with an unknown number of rounds",
    "give the trip count as a constant, or collect into a carried tensor of fixed size",
)
def loop_scan_output(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for node in model.nodes("Loop"):
        carried = max(len(node.inputs) - 2, 0)
        scans = [name for name in node.outputs[carried:] if name]
        if scans and node.scope.constant(node.input(0)) is None:
            yield node.where, "'%s' has a length that only running it tells" % scans[0]


@rule(
    "EP043",
    WARNING,
    "If in a graph for TensorRT-RTX",
    "export with --target, which attaches function bodies without If",
)
def rtx_if(model: Model, reader: Reader) -> Places:
    if reader.kind == "rtx":
        for node in model.nodes("If"):
            yield node.where, "building takes 3 to 10 times as long, the engine is as much larger"


@rule(
    "EP044",
    WARNING,
    "number of results that depends on values",
    "mask with Where, or take a fixed number with TopK",
)
def data_dependent(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for node in model.nodes("NonZero", "NonMaxSuppression"):
        yield (
            node.where,
            "%s leaves the size to run time: the engine has to allocate" % (node.op_type),
        )


# Which input of an operator is a shape, a length or a limit.
SHAPE_INPUTS = {
    "Reshape": (1,), "Expand": (1,), "ConstantOfShape": (0,), "Tile": (1,), "Range": (0, 1, 2),
    "Resize": (3,), "Slice": (1, 2), "Pad": (1,),
}  # fmt: skip


@rule(
    "EP045",
    WARNING,
    "shape computed from values",
    "compute sizes from Shape; pass a length as the size of an axis",
)
def shape_from_values(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for node in model.nodes(*SHAPE_INPUTS):
        for index in SHAPE_INPUTS[node.op_type]:
            source = _value_source(node.scope, node.input(index), set())
            if source:
                text = "input %d comes from the values of '%s': it has to be on the host"
                yield node.where, text % (index, source)


def _value_source(scope: Scope, name: str, seen: Set[Tuple[Scope, str]]) -> str:
    """The graph input whose values, not only its shape, a value is computed from; or nothing."""
    pending = [(scope, name)]
    while pending:
        here, wanted = pending.pop()
        owner = here.owner(wanted) if wanted else None
        if owner is None or (owner, wanted) in seen or wanted in owner.initializers:
            continue
        seen.add((owner, wanted))
        node = owner.producers.get(wanted)
        if node is None:
            if owner.parent is None and not owner.where:
                return wanted
            index = next((i for i, v in enumerate(owner.inputs) if v.name == wanted), None)
            pending += [
                (call.scope, call.input(index)) for call in owner.callers if index is not None
            ]
        elif not (node.is_standard and node.op_type in ("Shape", "Size")):
            pending += [(owner, x) for x in node.inputs]
    return ""
