"""The same graph for different readers: with or without function bodies, by opset and parser.

    portable   opset 20, IR 9, functions      ONNX Runtime; TensorRT-RTX with the form without If
    plugins    opset 20, IR 9, no functions   TensorRT 10 and 11, where a plugin does the work
    plugins    opset 17, IR 8, no functions   TensorRT 8.5

A node without a function keeps the operator's own name, which is the name of the plugin's creator,
and says which plugin it wants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
import onnx.version_converter
import onnx_ir as ir
from onnx import helper

from .. import __version__
from ..errors import BadInput
from ..ops.attach import attach_functions
from ..ops.attention_body import FEW
from ..ops.registry import DOMAIN, VERSION, operators
from ..resources import resource
from ..targets import Target
from .opset17 import lower_to_17

# The IR version of the onnx release that brought the opset; readers refuse a newer one.
IR_VERSIONS = {17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10}
PLUGIN_ATTRIBUTES = {"plugin_version": "1", "plugin_namespace": DOMAIN}


def portable(model: ir.Model, form: str = "auto", opset: int = 20) -> onnx.ModelProto:
    """The model with a function body for each of its edgepool nodes."""
    proto = _proto(model, opset)
    attach_functions(proto, _form_of(model, form))
    for function in proto.functions:
        for entry in function.opset_import:
            if entry.domain == "":
                entry.version = opset  # the bodies mean the same in opsets 20 to 22
    onnx.checker.check_model(proto, full_check=True)
    return proto


def _form_of(model: ir.Model, form: str) -> str:
    """`auto` chooses by the number of queries; where that is fixed, there is nothing to choose.

    ONNX Runtime infers the shapes of both branches of an If, and refuses the one that cannot be.
    """
    axes = [node.inputs[0].shape for node in model.graph if node.domain == DOMAIN]
    fixed = [shape[1] for shape in axes if shape is not None and isinstance(shape[1], int)]
    if form != "auto" or not fixed:
        return form
    return "mask" if max(fixed) > FEW else "gather"


def for_plugins(model: ir.Model, opset: int = 20, known: Iterable[str] = ()) -> onnx.ModelProto:
    """The model with bare edgepool nodes that name their plugin; known: the parser's operators.

    Raises BadInput for a node that is not known, or has no form in the opset.
    """
    if opset == 17:
        model = ir.serde.deserialize_model(ir.serde.serialize_model(model))
        lower_to_17(model)
    proto = _proto(model, opset)
    onnx.checker.check_model(proto, full_check=True)
    names = operators()
    for node in proto.graph.node:
        if node.domain == DOMAIN and node.op_type in names:
            attributes = (helper.make_attribute(k, v) for k, v in PLUGIN_ATTRIBUTES.items())
            node.attribute.extend(attributes)
    check_operators(proto, known)
    return proto


def for_target(model: ir.Model, target: Target) -> onnx.ModelProto:
    """The model as a target's reader takes it: see `portable` and `for_plugins`."""
    if not target.runs_plugins:
        return portable(model, target.functions, target.opset)
    known = parser_operators(target.operators) if target.operators else ()
    return for_plugins(model, target.opset, known)


def runnable(model: onnx.ModelProto) -> onnx.ModelProto:
    """A variant in a form that ONNX Runtime executes, to compare it with PyTorch.

    A graph of opset 17 is taken up to 20 by ONNX's own converter, an independent reading of what
    was written; then the function bodies are attached.
    """
    if model.functions:
        return model
    model = without_plugin_attributes(model)
    if any(not entry.domain and entry.version < 20 for entry in model.opset_import):
        model = onnx.version_converter.convert_version(model, 20)
        model.ir_version = IR_VERSIONS[20]
    attach_functions(model, "mask")
    return model


def without_plugin_attributes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose edgepool nodes have the operators' own attributes only."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        kept = [a for a in node.attribute if a.name not in PLUGIN_ATTRIBUTES]
        if len(kept) < len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(kept)
    return copy


def check_operators(model: onnx.ModelProto, known: Iterable[str]) -> None:
    """Raise BadInput for a standard operator that is not in `known` (empty: everything is)."""
    known = set(known)
    for node in _nodes(model.graph):
        if known and not node.domain and node.op_type not in known:
            raise BadInput(f"node '{node.name}': the target's parser does not know {node.op_type}")


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and of the branches and loops inside it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def parser_operators(name: str) -> list[str]:
    """The standard operators that a parser knows, from export/operators/NAME.txt."""
    lines = resource("export", "operators", f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _proto(model: ir.Model, opset: int) -> onnx.ModelProto:
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain == DOMAIN and node.graph is not model.graph:
            raise BadInput(
                f"node '{node.name}': {node.op_type} stands in a branch or loop: its state would be"
                " copied; call it outside, and choose between results"
            )
    proto = ir.serde.serialize_model(model)
    proto.ir_version = IR_VERSIONS[opset]
    proto.producer_name, proto.producer_version = "edgepool", __version__
    del proto.opset_import[:]
    proto.opset_import.extend([helper.make_opsetid("", opset)])
    if any(node.domain == DOMAIN for node in proto.graph.node):
        proto.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    return proto
