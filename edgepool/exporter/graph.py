"""From PyTorch to an ONNX graph: torch.export, bare edgepool nodes, weights as inputs.

`torch.onnx.export` inlines every function it is given, so the operators are translated to single
nodes here and their bodies are attached later (`edgepool.ops.attach`). Weights come out as graph
inputs after the real ones: the graph is valid without them, nothing of their size is ever held, and
`weights.write_model` turns them into initialisers while it streams them to disk.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ..config import STEP_INPUTS, ModelConfig, StateSpec, state_specs
from ..errors import BadInput
from ..model import Model, new_state
from ..ops.registry import DOMAIN, VERSION, Operator, operators
from ..ops.schema import op_schema, register_schemas

OPSET = 20

# Sizes of the example inputs: all different, so that none is taken for another; none is 0 or 1,
# which torch.export would make constants.
EXAMPLE = {"batch": 2, "seq": 5, "logical_pages": 3, "rows": 4, "pages": 7}


def trace_model(config: ModelConfig, dtype: torch.dtype, opset: int = OPSET) -> ir.Model:
    """The graph of a model with weights and activations in `dtype`, without any weight.

    Inputs and outputs are those of `Model.forward`, then one output `hidden.I` per layer; after the
    inputs come the weights, named as in `weight_shapes`.
    """
    specs = state_specs(config)
    with torch.device("meta"):
        model = Model(config)
    with FakeTensorMode():
        fakes = {n: torch.empty(p.shape, dtype=dtype) for n, p in model.named_parameters()}
        model.load_state_dict(fakes, assign=True)
        ids, table, rows = (
            torch.zeros(EXAMPLE["batch"], EXAMPLE[size], dtype=torch.int32)
            for size in ("seq", "logical_pages", "rows")
        )
        past, new = (torch.zeros(EXAMPLE["batch"], dtype=torch.int32) for _ in range(2))
        state = new_state(config, EXAMPLE["batch"], EXAMPLE["pages"], dtype)
    dims = {name: torch.export.Dim(name) for name in EXAMPLE}
    axes = [
        {0: dims["batch"], 1: dims["seq"]},
        {0: dims["batch"], 1: dims["logical_pages"]},
        {0: dims["batch"]},
        {0: dims["batch"]},
        {0: dims["batch"], 1: dims["rows"]},
        tuple(_state_axes(spec, dims) for spec in specs),
    ]
    hidden = [f"hidden.{i}" for i in range(config.num_layers)]
    return trace(
        _Layers(model.requires_grad_(False).eval()),
        (ids, table, past, new, rows, *state),
        tuple(axes),
        inputs=[*STEP_INPUTS, *(spec.name for spec in specs)],
        outputs=["logits", *(f"{spec.name}_out" for spec in specs), *hidden],
        opset=opset,
        prefix="model.",
    )


def _state_axes(spec: StateSpec, dims: Mapping[str, Any]) -> dict[int, Any]:
    return {axis: dims[size] for axis, size in enumerate(spec.shape) if isinstance(size, str)}


class _Layers(nn.Module):
    """The model with the layers' outputs as outputs, flat: (logits, *state, *hidden)."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        page_table: Tensor,
        past_len: Tensor,
        new_len: Tensor,
        logit_rows: Tensor,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        step = (input_ids, page_table, past_len, new_len, logit_rows)
        logits, hidden, updated = self.model.forward_layers(*step, *state)
        return (logits, *updated, *hidden)


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    dynamic_shapes: Any,
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int = OPSET,
    prefix: str = "",
) -> ir.Model:
    """The ONNX graph of any module in eval mode, with its parameters and buffers as extra inputs.

    args are distinct tensors: the same tensor twice would be taken for one input. dynamic_shapes
    has `torch.export.Dim`s, whose names the axes get. prefix is removed from parameter names.
    Raises BadInput for what torch.export or its translation to ONNX cannot do.
    """
    register_schemas()
    with _quiet():
        try:
            program = torch.export.export(module, args, dynamic_shapes=dynamic_shapes)
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                input_names=list(inputs),
                output_names=list(outputs),
                custom_translation_table=_translations(),
                optimize=False,
                verbose=False,
            )
        except (RuntimeError, torch.onnx.OnnxExporterError, torch._dynamo.exc.UserError) as error:
            raise BadInput(f"the module cannot be exported: {_reason(error)}") from error
    assert onnx_program is not None
    model = onnx_program.model
    _name_axes(model, program, dynamic_shapes)
    for name in module.state_dict():
        if name in model.graph.initializers:
            value = model.graph.initializers.pop(name)
            value.const_value = None
            value.name = name.removeprefix(prefix)
            model.graph.inputs.append(value)
    return model


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For every edgepool operator, the function that makes its ONNX node."""
    opset = onnxscript.values.Opset(DOMAIN, VERSION)
    return {op.torch_op._opoverload: _translation(op, opset) for op in operators().values()}


def _translation(operator: Operator, opset: Any) -> Callable[..., Any]:
    """A function with the signature of the torch operator: tensors, then attributes with types."""
    node = onnxscript.values.Op(opset, operator.name, op_schema(operator))
    kinds: dict[str, Any] = {x.name: inspect.Parameter.empty for x in operator.inputs}
    kinds.update({x.name: x.kind for x in operator.attributes})

    def translate(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(kinds, args), **kwargs)
        tensors = [values[x.name] for x in operator.inputs]
        return node(*tensors, **{x.name: values[x.name] for x in operator.attributes})

    position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    translate.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, position, annotation=kind) for name, kind in kinds.items()]
    )
    attributes = {x.name: x.kind for x in operator.attributes}
    translate.__annotations__ = attributes
    translate.__name__ = operator.name
    return translate


def _name_axes(model: ir.Model, program: torch.export.ExportedProgram, shapes: Any) -> None:
    """Give the symbolic sizes the names of their Dims."""
    leaf = lambda x: x is None or (isinstance(x, dict) and all(isinstance(k, int) for k in x))  # noqa: E731
    specs = pytree.tree_leaves(shapes, is_leaf=leaf)
    users = [s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    names: dict[str, str] = {}
    for user, spec in zip(users, specs, strict=True):
        for axis, dim in (spec or {}).items():
            if isinstance(dim, torch.export.Dim.__class__) or hasattr(dim, "__name__"):
                names.setdefault(str(values[user].shape[axis]), dim.__name__)
    for value in _values(model):
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(size, names) for size in value.shape])


def _renamed(size: Any, names: Mapping[str, str]) -> Any:
    return names.get(str(size), str(size)) if isinstance(size, ir.SymbolicDim) else size


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    yield from model.graph.initializers.values()
    for node in model.graph:
        yield from node.outputs


def _reason(error: BaseException) -> str:
    """The first line of the innermost error: the outer ones hold pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch and onnxscript log and warn about their own internals off the terminal."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
