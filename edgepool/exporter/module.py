"""`edgepool.export_module`: the exporter for anybody's own `nn.Module` with edgepool operators."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import BadInput, GateFailed
from ..files import new_files
from ..targets import find_target
from . import lower
from .graph import trace
from .parity import largest_difference
from .probe import Probe, read_graph
from .simplify import simplify
from .weights import weights_of, write_model

TOLERANCE = 1e-3


def export_module(
    module: nn.Module,
    example_inputs: Sequence[Any],
    dynamic_shapes: Any,
    path: str | os.PathLike[str],
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    target: str | None = None,
    tolerance: float = TOLERANCE,
) -> Path:
    """Export a module to an ONNX file, and prove the file equal to the module.

    module          anything torch.export takes, with edgepool operators or without; its evaluation
                    mode is exported
    example_inputs  the positional arguments of `forward`: tensors, or lists of tensors. Sizes along
                    dynamic axes must be at least 2
    dynamic_shapes  as in torch.export; an axis can also be given by name ({0: "batch"}), and axes
                    of the same name have the same size
    path            the file to write; weights over 1.5 GB go to `<path>.data`
    input_names     by default the names of forward's parameters
    output_names    by default `output`, or `output.0`, `output.1`, ...
    target          lower the graph for this target (`edgepool targets`). By default it is portable:
                    stock ONNX Runtime runs it
    tolerance       the largest |difference| between ONNX Runtime and PyTorch on example_inputs

    Returns the path. Raises BadInput for a module that cannot be exported or has no form on the
    target, GateFailed when the results differ; then no file is left.
    """
    path = Path(path)
    profile = find_target(target) if target is not None else None
    args = pytree.tree_map_only(Tensor, torch.clone, tuple(example_inputs))
    inputs = list(input_names or _input_names(module, args))
    flat = pytree.tree_leaves(args)
    if len(inputs) != len(flat):
        raise BadInput(f"{len(inputs)} input names for {len(flat)} input tensors")
    with _evaluating(module), torch.no_grad():
        expected = pytree.tree_leaves(module(*pytree.tree_map_only(Tensor, torch.clone, args)))
        outputs = list(output_names or _output_names(len(expected)))
        if len(outputs) != len(expected):
            raise BadInput(f"{len(outputs)} output names for {len(expected)} output tensors")
        model = trace(module, args, _with_dims(dynamic_shapes), inputs, outputs)
    skeleton = simplify(model, len(inputs))
    weights = weights_of(skeleton, module.state_dict())
    if profile is None or not profile.runs_plugins:
        lowered = lower.portable(skeleton.model, profile.functions if profile else "auto")
    else:
        known = lower.parser_operators(profile.operators) if profile.operators else ()
        lowered = lower.for_plugins(skeleton.model, profile.opset, known)

    with new_files(path) as folder:
        write_model(lowered, weights, folder / path.name)
        probe = Probe(lower.runnable(read_graph(folder / path.name)), folder)
        got = probe.run(dict(zip(inputs, (x.numpy() for x in flat))))
        for name, theirs in zip(outputs, expected):
            worst = largest_difference(got[name], theirs.numpy().astype(np.float32))
            if worst > tolerance:
                raise GateFailed(
                    f"output '{name}' differs by {worst:.3g} from PyTorch (limit {tolerance:g})"
                )
    return path


def _input_names(module: nn.Module, args: tuple[Any, ...]) -> Iterator[str]:
    """The name of every tensor: its parameter's, with a number where the argument is a list."""
    bound = inspect.signature(module.forward).bind(*args)
    for name, value in bound.arguments.items():
        if isinstance(value, Tensor):
            yield name
        else:
            yield from (f"{name}.{i}" for i in range(len(pytree.tree_leaves(value))))


def _output_names(count: int) -> list[str]:
    return ["output"] if count == 1 else [f"output.{i}" for i in range(count)]


def _with_dims(shapes: Any) -> Any:
    """dynamic_shapes with a Dim for every name, the same for the same name."""
    dims: dict[str, Any] = {}

    def dim(value: Any) -> Any:
        if isinstance(value, str):
            return dims.setdefault(value, torch.export.Dim(value))
        return value

    return pytree.tree_map(dim, shapes)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; afterwards as it was."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
