"""ONNX schemas of the operators: documentation, types, and type and shape inference."""

from __future__ import annotations

import onnx
from onnx import TensorProto, defs, helper
from onnx.shape_inference import InferenceContext, InferenceError

from .registry import DOMAIN, VERSION, Argument, Operator, operators

FLOATS = {"tensor(float)": TensorProto.FLOAT, "tensor(float16)": TensorProto.FLOAT16}
_KINDS = {
    int: defs.OpSchema.AttrType.INT,
    float: defs.OpSchema.AttrType.FLOAT,
    str: defs.OpSchema.AttrType.STRING,
}
_FIXED = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}
_TYPES = {"float32": "tensor(float)", "int32": "tensor(int32)"}
CONSTRAINTS = [
    ("T", list(FLOATS), "activations, and storage that is not quantised"),
    ("P", [*FLOATS, "tensor(int8)"], "storage: T, or int8 with float32 scales"),
]


def op_schema(operator: Operator) -> defs.OpSchema:
    """The operator's OpSchema, with its inference function."""
    schema = defs.OpSchema(
        operator.name,
        DOMAIN,
        VERSION,
        operator.text,
        inputs=[_parameter(x) for x in operator.inputs],
        outputs=[_parameter(x) for x in operator.outputs],
        type_constraints=CONSTRAINTS,
        attributes=[
            defs.OpSchema.Attribute(x.name, _KINDS[x.kind], x.text, required=True)
            for x in operator.attributes
        ],
    )
    schema.set_type_and_shape_inference_function(lambda context: infer(operator, context))
    return schema


def register_schemas() -> None:
    """Make the schemas known to `onnx` (checker, shape inference); safe to call again."""
    for operator in operators().values():
        if not defs.has(operator.name, DOMAIN):
            defs.register_schema(op_schema(operator))


def infer(operator: Operator, context: InferenceContext) -> None:
    """Set the output types of a node; raises InferenceError where its inputs do not fit."""
    types = [context.get_input_type(i).tensor_type for i in range(context.get_num_inputs())]
    values = {
        x.name: helper.get_attribute_value(context.get_attribute(x.name))
        for x in operator.attributes
    }
    element, sizes = bind(operator, types, values)
    for i, output in enumerate(operator.outputs):
        shape = [sizes.get(x) if isinstance(x, str) else x for x in output.shape]
        source = next((n for n, x in enumerate(operator.inputs) if x.name == _source(output)), None)
        if source is not None and is_unused(operator.inputs[source], types[source]):
            shape = [1]
        context.set_output_type(i, helper.make_tensor_type_proto(element[output.type], shape))


def bind(
    operator: Operator, types: list[onnx.TypeProto.Tensor], attributes: dict[str, object]
) -> tuple[dict[str, int], dict[str, int | str | None]]:
    """Element types by type name and sizes by size name that the input types of a node imply.

    A size is a number, or the name or None of a dynamic one. Raises InferenceError.
    """
    element = dict(_FIXED)
    sizes: dict[str, int | str | None] = {
        name: value for name, value in attributes.items() if isinstance(value, int)
    }
    for argument, tensor in zip(operator.inputs, types, strict=True):
        where = f"{DOMAIN}.{operator.name}: input '{argument.name}'"
        expected = element.setdefault(argument.type, tensor.elem_type)
        if tensor.elem_type != expected:
            found = TensorProto.DataType.Name(tensor.elem_type)
            raise InferenceError(f"{where} is {found}, not {TensorProto.DataType.Name(expected)}")
        if not tensor.HasField("shape") or is_unused(argument, tensor):
            continue
        if len(tensor.shape.dim) != len(argument.shape):
            raise InferenceError(
                f"{where} has {len(tensor.shape.dim)} axes, not {len(argument.shape)}"
            )
        for axis, (name, dim) in enumerate(zip(argument.shape, tensor.shape.dim, strict=True)):
            size = dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            known = name if isinstance(name, int) else sizes.get(name)
            if isinstance(known, int) and isinstance(size, int) and size != known:
                raise InferenceError(
                    f"{where} has size {size} on axis {axis}, not {known} ({name})"
                )
            if isinstance(name, str) and not isinstance(known, int) and size is not None:
                sizes[name] = size
    if element.get("P", TensorProto.INT8) not in (TensorProto.INT8, element["T"]):
        raise InferenceError(f"{DOMAIN}.{operator.name}: unquantised storage must have the type T")
    return element, sizes


def is_unused(argument: Argument, tensor: onnx.TypeProto.Tensor) -> bool:
    """Whether the tensor is the size-1 constant that stands for an unused input."""
    dims = tensor.shape.dim
    return bool(argument.unused) and len(dims) == 1 and dims[0].dim_value == 1


def _source(output: Argument) -> str:
    """The input that an output carries on, by name: `k_scale_out` carries on `k_scale`."""
    return output.name.removesuffix("_out")


def _parameter(argument: Argument) -> defs.OpSchema.FormalParameter:
    shape = ", ".join(str(x) for x in argument.shape)
    unused = f" With {argument.unused} a constant of shape [1]." if argument.unused else ""
    text = f"[{shape}] {argument.text}{unused}"
    return defs.OpSchema.FormalParameter(
        argument.name, _TYPES.get(argument.type, argument.type), text
    )
