"""Passes over a traced graph: what every target profits from, before any lowering.

What comes from torch.export computes shapes that are known and transposes weights at run time.
After `simplify` a linear layer is one MatMul whose weight is stored as the MatMul reads it, a
reshape has a constant shape, equal nodes are one, and names say which module a node comes from.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer import _constant_folding

from ..ops.registry import DOMAIN, operators


@dataclass
class Skeleton:
    """A graph whose weights are graph inputs behind the first `inputs` ones.

    transposed names the weights that the graph takes as [in, out] where the module has [out, in].
    """

    model: ir.Model
    inputs: int
    transposed: set[str] = field(default_factory=set)

    @property
    def weights(self) -> list[ir.Value]:
        return list(self.model.graph.inputs[self.inputs :])


def simplify(model: ir.Model, inputs: int) -> Skeleton:
    """Simplify a graph as `graph.trace` makes it, in place; inputs counts the real graph inputs."""
    skeleton = Skeleton(model, inputs)
    _fold(model)
    _constants_of_shape(model)
    _whole_slices(model)
    _fold(model)
    _transposed_weights(skeleton)
    _constant_reshapes(model)
    _clean(model)
    _drop_unused_weights(skeleton)
    _name(model)
    return skeleton


def _fold(model: ir.Model) -> None:
    """Evaluate what depends on constants alone.

    As onnxscript's `optimize` does, without its rewrite rules: they take a minute for thirty
    layers and find nothing here.
    """
    fold = _constant_folding.FoldConstantsPass(
        shape_inference=False, input_size_limit=1024, output_size_limit=1 << 16
    )
    ir.passes.Sequential(common.InlinePass(), fold, common.RemoveUnusedNodesPass())(model)
    _clean(model)


def _clean(model: ir.Model) -> None:
    ir.passes.Sequential(
        common.IdentityEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
    )(model)


def _constants_of_shape(model: ir.Model) -> None:
    """ConstantOfShape of a small constant shape (the inputs a mode does not use): a constant."""
    for node in list(model.graph):
        shape = node.inputs[0] if node.op_type == "ConstantOfShape" else None
        if shape is None or shape.const_value is None:
            continue
        sizes = shape.const_value.numpy()
        fill = node.attributes.get("value")
        value = fill.as_tensor().numpy() if fill is not None else np.zeros(1, np.float32)
        if sizes.prod() <= 16:
            _replace(model, node, np.full(sizes, value[0], value.dtype))


def _whole_slices(model: ir.Model) -> None:
    """Slice from 0 to the end in steps of 1 (an index `x[:, None]` leaves one): its input."""
    for node in list(model.graph):
        bounds = [x.const_value for x in node.inputs[1:]] if node.op_type == "Slice" else []
        if len(bounds) == 4 and None not in (bounds[0], bounds[1], bounds[3]):
            start, end, step = (bounds[i].numpy() for i in (0, 1, 3))
            if (start == 0).all() and (end == np.iinfo(np.int64).max).all() and (step == 1).all():
                node.outputs[0].replace_all_uses_with(node.inputs[0])
                model.graph.remove(node, safe=True)


def _replace(model: ir.Model, node: ir.Node, array: np.ndarray) -> None:
    """Put a constant in the place of a node's only output."""
    old = node.outputs[0]
    constant = initializer(model, f"{old.name}_value", array)
    old.replace_all_uses_with(constant)
    model.graph.remove(node, safe=True)


def initializer(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    """Add a small constant under a name that is not taken yet."""
    unique, n = name, 1
    while unique in model.graph.initializers:
        unique, n = f"{name}_{n}", n + 1
    tensor = ir.tensor(array, name=unique)
    value = ir.Value(
        name=unique, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    model.graph.register_initializer(value)
    return value


def _transposed_weights(skeleton: Skeleton) -> None:
    """MatMul(x, Transpose(w)): w stored transposed; where w has other readers, Gemm(x, w, transB).

    The other reader is a tied embedding's Gather: the table is stored once, and Gemm reads it as
    fast as MatMul reads a transposed copy.
    """
    weights = {value: value for value in skeleton.weights}
    for weight in weights:
        turns = [node for node in weight.consumers() if _is_turn(node)]
        if not turns:
            continue
        if len(turns) == len(weight.consumers()):
            rows, columns = weight.shape
            weight.shape = ir.Shape([columns, rows])
            skeleton.transposed.add(weight.name)
            for turn in turns:
                turn.outputs[0].replace_all_uses_with(weight)
                skeleton.model.graph.remove(turn, safe=True)
        else:
            for turn in turns:
                for product in list(turn.outputs[0].consumers()):
                    if product.op_type == "MatMul" and product.inputs[1] is turn.outputs[0]:
                        _gemm(skeleton.model, product, weight)


def _is_turn(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == [1, 0]


def _gemm(model: ir.Model, product: ir.Node, weight: ir.Value) -> None:
    """Put Gemm(x as a matrix, weight, transB=1) in the place of MatMul(x, Transpose(weight))."""
    x, out = product.inputs[0], product.outputs[0]
    width, count = int(weight.shape[1]), int(weight.shape[0])
    graph, scope = model.graph, dict(product.metadata_props)

    def node(op_type: str, inputs: list[ir.Value], shape: list, attributes: dict) -> ir.Value:
        made = ir.node(op_type, inputs, attributes, metadata_props=scope)
        made.outputs[0].shape, made.outputs[0].type = ir.Shape(shape), out.type
        graph.insert_before(product, made)
        return made.outputs[0]

    flat = initializer(model, "matrix_shape", np.array([-1, width], np.int64))
    matrix = node("Reshape", [x, flat], [None, width], {})
    result = node("Gemm", [matrix, weight], [None, count], {"transB": 1})
    sizes = node("Shape", [x], [len(x.shape) - 1], {"start": 0, "end": len(x.shape) - 1})
    last = initializer(model, "columns", np.array([count], np.int64))
    sizes.type = ir.TensorType(ir.DataType.INT64)
    shape = node("Concat", [sizes, last], [len(x.shape)], {"axis": 0})
    shape.type = ir.TensorType(ir.DataType.INT64)
    final = ir.node("Reshape", [result, shape], metadata_props=scope)
    graph.insert_before(product, final)
    take_over(out, final.outputs[0])
    graph.remove(product, safe=True)


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Let `new` have the readers, name, type and place among the graph outputs of `old`."""
    new.shape, new.type, name = old.shape, old.type, old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name, new.name = f"{name}_replaced", name


def _constant_reshapes(model: ir.Model) -> None:
    """Reshape to computed sizes: a constant shape, with 0 for a size that stays where it is."""
    for node in model.graph:
        if node.op_type != "Reshape" or node.inputs[1].const_value is not None:
            continue
        before, after = node.inputs[0].shape, node.outputs[0].shape
        if before is None or after is None:
            continue
        target = [_kept(size, axis, before) for axis, size in enumerate(after)]
        if target.count(-1) <= 1:
            constant = initializer(model, "shape", np.array(target, np.int64))
            node.replace_input_with(1, constant)
            node.attributes.pop("allowzero", None)


def _kept(size: object, axis: int, before: ir.Shape) -> int:
    if isinstance(size, int):
        return size
    return 0 if axis < len(before) and before[axis] == size else -1


def _drop_unused_weights(skeleton: Skeleton) -> None:
    graph = skeleton.model.graph
    for value in skeleton.weights:
        if not value.uses():
            graph.inputs.remove(value)


# ------------------------------------------------------------------------------------- names


def _name(model: ir.Model) -> None:
    """Name nodes `scope/OpType` and values after their node; drop torch's metadata.

    The metadata has stack traces with this machine's paths, and is ten times the graph.
    """
    outputs = set(model.graph.outputs)
    produced = {op.name: [x.name for x in op.outputs] for op in operators().values()}
    numbered = _numbering()
    for node in model.graph:
        scope = _scope(node)
        node.name = numbered(f"{scope}/{node.op_type}" if scope else node.op_type)
        names = produced.get(node.op_type, []) if node.domain == DOMAIN else []
        for i, value in enumerate(node.outputs):
            if value in outputs:
                continue
            if names:
                value.name = f"{node.name}.{names[i]}"
            else:
                value.name = node.name if i == 0 else f"{node.name}.{i}"
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    constants = _numbering()
    used = {x: None for node in model.graph for x in node.inputs if x and x.is_initializer()}
    model.graph.initializers.clear()
    for value in used:
        value.name = constants(f"constant.{value.dtype.name.lower()}")
        value.const_value.name = value.name
        value.metadata_props.clear()
        model.graph.register_initializer(value)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()


def _numbering() -> Callable[[str], str]:
    seen: Counter[str] = Counter()

    def numbered(name: str) -> str:
        seen[name] += 1
        return name if seen[name] == 1 else f"{name}_{seen[name]}"

    return numbered


def _scope(node: ir.Node) -> str:
    """The module that the node comes from, as a path of attribute names."""
    scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    if len(scopes) > 1 and not scopes[-2].startswith("_empty_nn_module_stack"):
        return scopes[-2].removeprefix("model.")
    for value in node.inputs:
        if value is not None and value.producer() is not None:
            return value.producer().name.rpartition("/")[0]
    return ""
