"""Rules about standard operators: which exist, and which of their forms a parser reads."""

from __future__ import annotations

from typing import Callable, Dict, Tuple

from .graph import Model, Node
from .reader import ONNXRUNTIME_IR, Reader
from .rules import ERROR, WARNING, Places, rule

# Their axes became an input in opset 18; ReduceSum's in 13, which TensorRT 8 reads.
REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSumSquare"
).split()

OLDEST_OPSET = 9  # operators.md from 10.0 on


@rule(
    "EP001",
    ERROR,
    "operator that the parser does not know",
    "export with --target, which lowers what it can; write the rest with operators from the list",
)
def unknown_operator(model: Model, reader: Reader) -> Places:
    if not reader.operators:
        return
    for node in model.nodes():
        if node.is_standard and node.op_type not in reader.operators and not model.is_call(node):
            yield node.where, "%s does not import %s" % (reader.name, node.op_type)


@rule(
    "EP002",
    ERROR,
    "opset newer than the reader",
    "export again with --target, or with an older opset",
)
def opset_too_new(model: Model, reader: Reader) -> Places:
    newest = reader.newest_opset
    for scope in model.scopes:
        if scope.parent is None and scope.opset > newest:
            text = "opset %d; %s reads at most %d" % (scope.opset, reader.name, newest)
            yield scope.where or "model", text


@rule(
    "EP003",
    ERROR,
    "IR version newer than ONNX Runtime",
    "save the model with the IR version of its opset (9 for opset 20)",
)
def ir_too_new(model: Model, reader: Reader) -> Places:
    if reader.kind == "onnxruntime" and model.ir_version > ONNXRUNTIME_IR:
        text = "IR version %d; %s reads at most %d"
        yield "model", text % (model.ir_version, reader.name, ONNXRUNTIME_IR)


@rule(
    "EP004",
    ERROR,
    "axes of a reduction given as an input",
    "lower to opset 17, where the axes are an attribute (export --target does)",
)
def axes_as_input(model: Model, reader: Reader) -> Places:
    if not reader.before(10):
        return
    for node in model.nodes(*REDUCTIONS):
        if node.input(1):
            yield node.where, "%s ignores the input and reduces every axis" % reader.name


@rule(
    "EP005",
    ERROR,
    "attribute that the parser ignores",
    "take the slice with Gather; give Split its sizes as an input (export --target does)",
)
def ignored_attribute(model: Model, reader: Reader) -> Places:
    if not reader.before(10):
        return
    ignored = {"Shape": ("start", "end"), "Split": ("num_outputs",)}
    for node in model.nodes(*ignored):
        for name in ignored[node.op_type]:
            if name in node.attributes:
                yield node.where, "%s ignores the attribute %s" % (reader.name, name)


@rule(
    "EP006",
    ERROR,
    "scatter with a reduction",
    "scatter without reduction, or add what was there before to the updates",
)
def scatter_reduction(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for node in model.nodes("ScatterND", "ScatterElements"):
        reduction = node.get("reduction", "none")
        if reduction != "none" and (node.op_type == "ScatterND" or reader.before(10)):
            yield node.where, "%s has no reduction '%s' here" % (reader.name, reduction)


@rule(
    "EP009",
    WARNING,
    "opset older than the parser's documents go back",
    "export again with a newer opset, or lift the graph with ONNX's version converter",
)
def opset_too_old(model: Model, reader: Reader) -> Places:
    if not reader.parses or reader.before(10):
        return
    for scope in model.scopes:
        if scope.parent is None and 0 < scope.opset < OLDEST_OPSET:
            text = "opset %d; %s promises %d and later"
            yield scope.where or "model", text % (scope.opset, reader.name, OLDEST_OPSET)


# Per operator: index of the input that has to be a constant, its name, and for whom.
Applies = Callable[[Reader], bool]
CONSTANT_INPUTS: Dict[str, Tuple[int, str, Applies]] = {
    **{name: (1, "axes", lambda reader: True) for name in [*REDUCTIONS, "ReduceSum"]},
    "CumSum": (1, "axis", lambda reader: True),
    "OneHot": (1, "depth", lambda reader: True),
    "Pad": (3, "axes", lambda reader: reader.before(10, 4)),
    "Slice": (3, "axes", lambda reader: reader.before(10, 3)),
    "Squeeze": (1, "axes", lambda reader: reader.before(10, 7)),
    "Unsqueeze": (1, "axes", lambda reader: reader.before(10, 7)),
}


@rule(
    "EP007",
    ERROR,
    "input that has to be a constant",
    "fold constants (polygraphy surgeon sanitize --fold-constants), or fix it at export",
)
def input_not_constant(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for node in model.nodes(*CONSTANT_INPUTS):
        index, name, applies = CONSTANT_INPUTS[node.op_type]
        given = node.input(index)
        if given and applies(reader) and node.scope.constant(given) is None:
            yield node.where, "%s is computed; %s takes a constant" % (name, reader.name)


@rule(
    "EP008",
    ERROR,
    "output that the parser does not make",
    "remove the output, or compute it with other operators",
)
def unsupported_output(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for node in model.nodes("MaxPool", "LayerNormalization"):
        extra = [name for name in node.outputs[1:] if name and _is_used(model, node, name)]
        if extra:
            yield node.where, "%s makes only the first output" % reader.name


def _is_used(model: Model, node: Node, name: str) -> bool:
    """Whether anything reads a value: a node of the scope or of one inside it, or the output."""
    if any(value.name == name for value in node.scope.outputs):
        return True
    return any(
        name in other.inputs and other.scope.owner(name) is node.scope for other in model.nodes()
    )
