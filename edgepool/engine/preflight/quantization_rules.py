"""Rules about explicit quantisation: QuantizeLinear, DequantizeLinear and what feeds them."""

from __future__ import annotations

from .graph import Model
from .reader import Reader
from .rules import ERROR, WARNING, Places, rule

QDQ = ("QuantizeLinear", "DequantizeLinear")
NEW_TYPES = ("FLOAT8E4M3FN", "INT4", "FLOAT4E2M1")  # beside INT8, from TensorRT 10


@rule(
    "EP010",
    ERROR,
    "Q/DQ without a zero point",
    "give every QuantizeLinear and DequantizeLinear an INT8 zero point of 0",
)
def no_zero_point(model: Model, reader: Reader) -> Places:
    if not reader.before(10):
        return
    for node in model.nodes(*QDQ):
        if not node.input(2):
            yield node.where, "%s takes exactly 3 inputs" % reader.name


@rule(
    "EP011",
    ERROR,
    "zero point that is not zero",
    "quantise symmetrically (ActivationSymmetric and WeightSymmetric of ONNX Runtime)",
)
def asymmetric(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for node in model.nodes(*QDQ):
        zero = node.scope.constant(node.input(2))
        if zero is None and node.input(2):
            yield node.where, "the zero point is computed"
        values = zero.values() if zero is not None else None
        if values is not None and values.any():
            yield node.where, "zero point %d: TensorRT takes symmetric quantisation" % values.max()


@rule(
    "EP012",
    ERROR,
    "quantised type that the parser does not take",
    "quantise to INT8 (QInt8 for weights and activations)",
)
def quantized_type(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    allowed = ("INT8",) if reader.before(10) else ("INT8", *NEW_TYPES)
    for node in model.nodes(*QDQ):
        source = node.input(2) or (node.input(0) if node.op_type == "DequantizeLinear" else "")
        dtype = node.scope.dtype(source) if source else "UINT8"
        if not node.input(2) and node.op_type == "QuantizeLinear" and node.get("output_dtype", 0):
            dtype = node.scope.dtype(node.outputs[0])
        bias = node.op_type == "DequantizeLinear" and dtype == "INT32"  # EP016
        if dtype and dtype not in allowed and not bias:
            yield (
                node.where,
                "%s is no quantised type of %s%s"
                % (
                    dtype,
                    reader.name,
                    ", which reads it as INT8" if dtype == "UINT8" else "",
                ),
            )


@rule(
    "EP013",
    ERROR,
    "scale that is not float32",
    "keep the scales of QuantizeLinear and DequantizeLinear in float32",
)
def scale_type(model: Model, reader: Reader) -> Places:
    if not reader.before(10):
        return
    for node in model.nodes(*QDQ):
        dtype = node.scope.dtype(node.input(1))
        if dtype not in ("", "FLOAT"):
            yield node.where, "the scale is %s; %s takes FLOAT" % (dtype, reader.name)


@rule(
    "EP014",
    ERROR,
    "scale that is not positive",
    "calibrate with data that reaches the tensor, or leave it unquantised",
)
def scale_sign(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for node in model.nodes(*QDQ):
        scale = node.scope.constant(node.input(1))
        values = scale.values() if scale is not None else None
        if values is not None and not (values > 0).all():
            yield node.where, "scale %g: TensorRT takes positive ones" % values.min()


@rule(
    "EP015",
    ERROR,
    "INT8 constant",
    "store floats followed by a Q/DQ pair (AddQDQPairToWeight of ONNX Runtime)",
)
def int8_constant(model: Model, reader: Reader) -> Places:
    if not reader.before(10):
        return
    zeros = {
        (node.scope.owner(node.input(2)), node.input(2)) for node in model.nodes(*QDQ)
    }  # zero points are INT8 constants that it takes
    for scope, tensor in model.tensors():
        if tensor.dtype == "INT8" and (scope, tensor.name) not in zeros:
            yield tensor.name, "%s refuses weights of type INT8" % reader.name


@rule(
    "EP016",
    ERROR,
    "quantised bias",
    "leave biases in float (QuantizeBias=False of ONNX Runtime)",
)
def int32_bias(model: Model, reader: Reader) -> Places:
    if not reader.parses:
        return
    for node in model.nodes("DequantizeLinear"):
        if node.scope.dtype(node.input(0)) == "INT32":
            yield node.where, "%s does not dequantise INT32" % reader.name


@rule(
    "EP017",
    WARNING,
    "weight quantised by a node",
    "store the weight in INT8 with one DequantizeLinear: a quarter of the file",
)
def weight_as_pair(model: Model, reader: Reader) -> Places:
    if not reader.parses or reader.before(10):
        return
    for node in model.nodes("QuantizeLinear"):
        weight = node.scope.constant(node.input(0))
        if weight is not None:
            yield node.where, "%s is stored in %s" % (weight.name or "its input", weight.dtype)


@rule(
    "EP018",
    ERROR,
    "calibrator beside explicit quantisation",
    "use Q/DQ alone: build without a calibrator or calibration cache",
)
def calibrator(model: Model, reader: Reader) -> Places:
    if not reader.calibrator or not reader.parses:
        return
    if not reader.before(11):
        yield "build", "%s has no calibrators" % reader.name
    elif any(True for _ in model.nodes(*QDQ)):
        yield "build", "the graph has Q/DQ nodes, and the build would add a calibrator's ranges"


@rule(
    "EP019",
    ERROR,
    "activation quantised per channel",
    "use one scale for an activation, several for weights only",
)
def activation_per_channel(model: Model, reader: Reader) -> Places:
    if reader.kind != "tensorrt":
        return
    for node in model.nodes("QuantizeLinear"):
        scale = node.scope.constant(node.input(1))
        if scale is None or scale.elements == 1 or node.get("block_size", 0):
            continue
        if node.scope.constant(node.input(0)) is None:
            yield node.where, "%d scales for an activation" % scale.elements
