"""Give a model the function bodies of its edgepool nodes, so that it runs with no plugin."""

from __future__ import annotations

import onnx
from onnx import helper, shape_inference

from .body import Body, function
from .registry import DOMAIN, DYNAMIC_SIZES, VERSION, Operator, Site, operators
from .schema import bind, is_unused, register_schemas

FORMS = ("auto", "gather", "mask")


def attach_functions(model: onnx.ModelProto, form: str = "auto") -> None:
    """Add a function to `model`, in place, for every edgepool node.

    form  every form is right for any lengths. `auto`: fast for one, few and many queries, chosen by
          Ifs on the shapes; `mask`: no If, fast for many queries; `gather`: no If, fast for few.

    Bodies are written for the attributes, types and fixed sizes of their node. Nodes that agree in
    these share a function; where an operator needs several, the op_type of its nodes gets a number
    (TensorRT ignores FunctionProto.overload). Sizes come from the model's value_info and from
    shape inference. The result depends on nothing but the model and the form.

    Raises ValueError for an unknown form and for a node whose sizes cannot be inferred.
    """
    if form not in FORMS:
        raise ValueError(f"form {form!r} is not one of {', '.join(FORMS)}")
    register_schemas()
    known = operators()
    types = _types(shape_inference.infer_shapes(model, check_type=True, strict_mode=True))
    names: dict[tuple[str, Site], str] = {}
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        operator = known[node.op_type]
        site = _site(operator, node, types)
        if (operator.name, site) not in names:
            count = sum(name == operator.name for name, _ in names)
            name = f"{operator.name}_{count + 1}" if count else operator.name
            names[operator.name, site] = name
            model.functions.append(site_function(operator, site, form, name))
        node.op_type = names[operator.name, site]
    if names and not any(x.domain == DOMAIN for x in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))


def site_function(operator: Operator, site: Site, form: str, name: str) -> onnx.FunctionProto:
    """The operator's body for one site."""
    body = Body()
    values = operator.body(body, site, form)
    return function(
        DOMAIN,
        name,
        [x.name for x in operator.inputs],
        [x.name for x in operator.outputs],
        [x.name for x in operator.attributes],
        body,
        values,
    )


def _types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto.Tensor]:
    graph = model.graph
    types = {x.name: x.type.tensor_type for x in (*graph.input, *graph.value_info, *graph.output)}
    for tensor in graph.initializer:
        types[tensor.name] = helper.make_tensor_type_proto(
            tensor.data_type, tensor.dims
        ).tensor_type
    return types


def _site(
    operator: Operator, node: onnx.NodeProto, types: dict[str, onnx.TypeProto.Tensor]
) -> Site:
    where = f"node '{node.name}' ({operator.name})"
    missing = [x for x in node.input if x not in types]
    if missing:
        raise ValueError(f"{where}: type and shape of '{missing[0]}' are not known")
    inputs = [types[x] for x in node.input]
    values = {x.name: helper.get_attribute_value(x) for x in node.attribute}
    values = {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}
    element, sizes = bind(operator, inputs, values)
    for argument, tensor in zip(operator.inputs, inputs, strict=True):
        for size in () if is_unused(argument, tensor) else argument.shape:
            if isinstance(size, str) and size not in DYNAMIC_SIZES:
                if not isinstance(sizes.get(size), int):
                    raise ValueError(f"{where}: size {size} of '{argument.name}' is not fixed")
                values[size] = sizes[size]
    return Site(element["T"], element["P"], tuple(sorted(values.items())))
