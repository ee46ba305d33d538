"""One-node models of the operators, random inputs for them, and the comparison with PyTorch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime
import torch
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgepool.ops.attach import attach_functions
from edgepool.ops.registry import DOMAIN, DYNAMIC_SIZES, Operator, operators

Value = "int | float | str"
ELEMENTS = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.int8: TensorProto.INT8,
    torch.int32: TensorProto.INT32,
}


@dataclass(frozen=True)
class Site:
    """Where a test uses an operator: attributes, fixed sizes, types, and inputs it does not use."""

    name: str
    values: tuple[tuple[str, int | float | str], ...]
    activation: torch.dtype = torch.float32
    storage: torch.dtype = torch.float32
    unused: tuple[str, ...] = ()

    @property
    def operator(self) -> Operator:
        return operators()[self.name]

    def __getitem__(self, name: str) -> int | float | str:
        return dict(self.values)[name]

    @property
    def attributes(self) -> dict[str, int | float | str]:
        return {x.name: self[x.name] for x in self.operator.attributes}

    def dtype(self, kind: str) -> torch.dtype:
        fixed = {"float32": torch.float32, "int32": torch.int32}
        return {"T": self.activation, "P": self.storage, **fixed}[kind]

    def shape(self, argument, sizes) -> list[int | str]:
        """With `sizes` for the dynamic ones; [1] where the input is not used."""
        if argument.name.removesuffix("_out") in self.unused:
            return [1]
        known = {**dict(self.values), **sizes}
        return [known[x] if isinstance(x, str) else x for x in argument.shape]


def model(site: Site, form: str = "auto") -> onnx.ModelProto:
    """A model of one node, with its function attached (form "": bare)."""
    names = {x: x for x in DYNAMIC_SIZES}
    operator = site.operator
    node = helper.make_node(
        site.name,
        [x.name for x in operator.inputs],
        [x.name for x in operator.outputs],
        name="node",
        domain=DOMAIN,
        **site.attributes,
    )
    inputs, outputs = (
        [
            helper.make_tensor_value_info(
                x.name, ELEMENTS[site.dtype(x.type)], site.shape(x, names)
            )
            for x in arguments
        ]
        for arguments in (operator.inputs, operator.outputs)
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph([node], "one", inputs, outputs)
    result = helper.make_model(graph, opset_imports=imports, ir_version=9)
    if form:
        attach_functions(result, form)
    return result


@functools.cache
def session(site: Site, form: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model(site, form).SerializeToString(), options)


def run(site: Site, form: str, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of the body on ONNX Runtime."""
    feed = {name: x.numpy() for name, x in inputs.items()}
    return [torch.from_numpy(x) for x in session(site, form).run(None, feed)]


def reference(site: Site, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of the PyTorch definition."""
    result = site.operator.torch_op(*inputs.values(), **site.attributes)
    return list(result) if isinstance(result, tuple) else [result]


@dataclass
class Step:
    """A batch as a step finds it: how long each sequence is, and where its pages are."""

    rng: np.random.Generator
    page_table: torch.Tensor
    past_len: torch.Tensor
    new_len: torch.Tensor
    length: int
    pages: int
    sizes: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        batch, columns = self.page_table.shape
        self.sizes = {"B": batch, "S": self.length, "MP": columns, "NP": self.pages}


@st.composite
def steps(draw, page_size: int, lengths) -> Step:
    """Ragged batches over permuted page tables with holes; new_len may be 0 and less than S."""
    batch, columns = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    length, spare = draw(lengths), draw(st.sampled_from([0, 3, 60]))
    holes = draw(st.sampled_from([0.0, 0.25, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    capacity = columns * page_size
    new = [draw(st.integers(0, min(length, capacity))) for _ in range(batch)]
    past = [draw(st.integers(0, capacity - n)) for n in new]
    pages = 1 + batch * columns + spare
    table = rng.permutation(np.arange(1, pages))[: batch * columns].reshape(batch, columns)
    table[rng.random(table.shape) < holes] = 0
    int32 = functools.partial(torch.tensor, dtype=torch.int32)
    return Step(
        rng, torch.from_numpy(table.astype(np.int32)), int32(past), int32(new), length, pages
    )


def random_inputs(site: Site, step: Step) -> dict[str, torch.Tensor]:
    """Every input of the operator: pools are full of values but for the null page."""
    inputs = {}
    for argument in site.operator.inputs:
        shape = site.shape(argument, step.sizes)
        dtype = site.dtype(argument.type)
        if argument.name in ("page_table", "past_len", "new_len"):
            value = getattr(step, argument.name)
        elif argument.name in site.unused:
            value = torch.full(shape, -1 if dtype == torch.int32 else 0, dtype=dtype)
        elif dtype == torch.int8:
            value = torch.from_numpy(step.rng.integers(-127, 128, shape, dtype=np.int8))
        elif argument.name.endswith("_scale"):
            value = torch.from_numpy(step.rng.uniform(0.002, 0.02, shape).astype(np.float32))
        else:
            value = torch.from_numpy(step.rng.standard_normal(shape, dtype=np.float32)).to(dtype)
        inputs[argument.name] = value
        if "NP" in argument.shape and argument.name not in site.unused:
            value.select(argument.shape.index("NP"), 0).zero_()
    return inputs
