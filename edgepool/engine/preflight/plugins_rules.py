"""Rules about custom operators: names, plugins, functions, attributes, and state tensors."""

from __future__ import annotations

from typing import Iterator, List, Tuple

from .graph import Model, Node, Value
from .reader import Reader
from .rules import ERROR, WARNING, Places, rule

PLUGIN_ATTRIBUTES = ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS", "TENSOR")
ONNXRUNTIME_DOMAINS = ("com.microsoft", "com.microsoft.nchwc", "ai.onnx.ml")


def plugin_nodes(model: Model, reader: Reader) -> Iterator[Node]:
    """Custom nodes that reach a plugin: all but those whose function is built in their place."""
    if reader.kind != "tensorrt":
        return
    for node in model.nodes():
        if not node.is_standard and not (model.is_call(node) and _function_wins(node, reader)):
            yield node


def _function_wins(node: Node, reader: Reader) -> bool:
    """Whether the parser builds the node's local function though there is a plugin."""
    if reader.before(9) or not reader.has_plugin(node.op_type):
        return not reader.before(9)
    if reader.before(10, 7):
        return True
    return not reader.before(10, 15) and "plugin_namespace" not in node.attributes


@rule(
    "EP050",
    ERROR,
    "custom operator with the name of a built-in",
    "rename the operator: TensorRT's parser ignores the domain",
)
def hijacked_name(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for node in model.nodes():
        if not node.is_standard and node.op_type in reader.operators:
            text = "%s::%s would be taken for the standard %s"
            yield node.where, text % (node.domain, node.op_type, node.op_type)


@rule(
    "EP051",
    ERROR,
    "custom operator that nothing implements",
    "name the plugin (check --plugin NAME), or attach a function body to the operator",
)
def no_plugin(model: Model, reader: Reader) -> Places:
    for node in model.nodes():
        if node.is_standard or (model.is_call(node) and not reader.before(9)):
            continue
        known = reader.has_plugin(node.op_type) if reader.kind == "tensorrt" else False
        if reader.kind == "onnxruntime":
            known = node.domain in ONNXRUNTIME_DOMAINS
        if not known:
            text = "%s has no %s::%s%s"
            function = ", nor functions" if model.is_call(node) else ", and the file no function"
            yield node.where, text % (reader.name, node.domain, node.op_type, function)


@rule(
    "EP052",
    ERROR,
    "function that is built instead of the plugin",
    "export with --target, which leaves the functions out; from 10.15 on plugin_namespace does too",
)
def function_wins(model: Model, reader: Reader) -> Places:
    if reader.kind != "tensorrt":
        return
    for node in model.nodes():
        plugin = not node.is_standard and reader.has_plugin(node.op_type)
        if plugin and model.is_call(node) and _function_wins(node, reader):
            yield node.where, "%s prefers the local function to the plugin" % reader.name


@rule(
    "EP053",
    ERROR,
    "local function",
    "export with --target, which leaves the functions out, or inline them",
)
def local_function(model: Model, reader: Reader) -> Places:
    if reader.before(9):
        for domain, name in model.functions:
            yield "function %s::%s" % (domain, name), "%s has no functions" % reader.name


@rule(
    "EP054",
    ERROR,
    "functions that only their overload tells apart",
    "give each function its own name",
)
def overload(model: Model, reader: Reader) -> Places:
    if reader.parses:
        for name in model.overloads:
            yield "function %s" % name, "TensorRT takes the first body for every overload"


@rule(
    "EP055",
    ERROR,
    "absent input of a plugin",
    "pass a constant of one element instead of an empty name",
)
def absent_input(model: Model, reader: Reader) -> Places:
    if not reader.before(10):
        return
    for node in plugin_nodes(model, reader):
        if "" in node.inputs:
            text = "input %d is absent: %s crashes"
            yield node.where, text % (node.inputs.index(""), reader.name)


@rule(
    "EP056",
    ERROR,
    "attribute that a plugin cannot get",
    "use integers of 32 bits, floats, strings, lists of them, or tensors",
)
def plugin_attribute(model: Model, reader: Reader) -> Places:
    for node in plugin_nodes(model, reader):
        for name, attribute in node.attributes.items():
            if attribute.kind not in PLUGIN_ATTRIBUTES:
                yield node.where, "'%s' is a %s" % (name, attribute.kind.lower() or "reference")
            elif attribute.kind in ("INT", "INTS"):
                values = attribute.value if attribute.kind == "INTS" else [attribute.value]
                wide = [x for x in values if abs(x) >= 1 << 31]
                if wide:
                    yield node.where, "'%s' is %d, beyond 32 bits" % (name, wide[0])


@rule(
    "EP057",
    WARNING,
    "custom node that does not say which plugin it wants",
    "write the attributes plugin_version and plugin_namespace on the node (export --target does)",
)
def plugin_identity(model: Model, reader: Reader) -> Places:
    for node in plugin_nodes(model, reader):
        missing = [x for x in ("plugin_version", "plugin_namespace") if x not in node.attributes]
        if missing:
            yield (
                node.where,
                "no %s: version 1 of the namespace '' is looked up" % (" and no ".join(missing)),
            )


# ------------------------------------------------------------------------------------ state


def states(model: Model) -> List[Tuple[Value, Value]]:
    """Inputs that come back as an output of their name plus `_out`: bound to the same buffer."""
    outputs = {value.name: value for value in model.main.outputs}
    pairs = ((value, outputs.get(value.name + "_out")) for value in model.main.inputs)
    return [(value, output) for value, output in pairs if output is not None]


@rule(
    "EP060",
    ERROR,
    "state with more than one reader",
    "let later readers take the output of the node that updates the state",
)
def state_consumers(model: Model, reader: Reader) -> Places:
    if not (reader.kind == "tensorrt" and reader.target.runs_plugins):
        return
    names = {value.name for value, _ in states(model)}
    readers = {name: [] for name in names}  # type: dict
    for node in model.nodes():
        for name in set(node.inputs) & names:
            if node.scope.owner(name) is model.main:
                readers[name].append(node)
    for value, _ in states(model):
        found = readers[value.name]
        if len(found) > 1:
            others = " and ".join(node.name or node.op_type for node in found[:3])
            yield value.name, "read by %s: TensorRT would copy it every step" % others


@rule(
    "EP061",
    ERROR,
    "state that changes its type or shape, or has a type no plugin stores",
    "keep input and output of a state alike, in FLOAT, FLOAT16 or INT8",
)
def state_types(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for value, output in states(model):
        if value.dtype != output.dtype:
            yield value.name, "%s comes back as %s" % (value.dtype, output.dtype)
        elif reader.target.runs_plugins and value.dtype not in ("FLOAT", "FLOAT16", "INT8"):
            yield value.name, "a state in %s" % value.dtype
        elif _differ(value, output):
            yield value.name, "its shape differs from that of %s" % output.name


def _differ(value: Value, output: Value) -> bool:
    if value.dims is None or output.dims is None:
        return False
    if len(value.dims) != len(output.dims):
        return True
    both = zip(value.dims, output.dims)
    return any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in both)
