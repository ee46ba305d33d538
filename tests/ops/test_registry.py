"""Every operator is complete, its schema infers what PyTorch does, functions attach as promised."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnx.inliner
import pytest
import torch
from onnx import TensorProto, defs, helper, shape_inference

from edgepool import ops, resources
from edgepool.ops.attach import FORMS, attach_functions
from edgepool.ops.document import document
from edgepool.ops.registry import DOMAIN, VERSION, operators
from edgepool.ops.schema import register_schemas
from tests.ops.harness import ELEMENTS, Site, Step, model, random_inputs
from tests.ops.test_bodies import ATTENTION_SITES, POOL_SITES, SELECT_SITES

SITES = {**POOL_SITES, **SELECT_SITES, **ATTENTION_SITES}
SITES.update(
    {f"read {k}": Site("SharedKVRead", x.values, x.activation, x.storage, x.unused)
     for k, x in ATTENTION_SITES.items()}
)  # fmt: skip
NAMES = ("IndexPool", "IndexPoolSelect", "SharedKVAttention", "SharedKVRead")


def step(page_size: int) -> Step:
    int32 = torch.int32
    table = torch.tensor([[3, 0, 5], [1, 4, 0]], dtype=int32)
    past, new = torch.tensor([page_size, 3], dtype=int32), torch.tensor([5, 0], dtype=int32)
    return Step(np.random.default_rng(0), table, past, new, 6, 7)


def inputs_of(site: Site) -> dict[str, torch.Tensor]:
    values = dict(site.values)
    return random_inputs(site, step(values.get("T") or values["U"] * values["ratio"]))


def test_there_is_one_of_each() -> None:
    assert tuple(operators()) == NAMES
    exported = [getattr(ops, name) for name in ops.__all__]
    assert {id(x.torch_op) for x in operators().values()} == {id(x) for x in exported}


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_is_the_same_in_torch_and_onnx(name: str) -> None:
    """Same names in the same order and the same types: the exporter relies on it."""
    operator = operators()[name]
    schema = operator.torch_op._opoverload._schema
    arguments = [x.name for x in schema.arguments]
    assert arguments == [x.name for x in (*operator.inputs, *operator.attributes)]
    kinds = [str(x.type) for x in schema.arguments[len(operator.inputs) :]]
    assert kinds == [{int: "int", float: "float", str: "str"}[x.kind] for x in operator.attributes]
    assert len(schema.returns) == len(operator.outputs)
    register_schemas()
    known = defs.get_schema(name, VERSION, DOMAIN)
    assert [x.name for x in known.inputs] == [x.name for x in operator.inputs]
    assert all(x.description for x in (*known.inputs, *known.outputs))
    assert all(x.required and x.description for x in known.attributes.values())
    builtin = {x.name for x in defs.get_all_schemas() if x.domain != DOMAIN}
    assert name not in builtin  # TensorRT's parser ignores domains


@pytest.mark.parametrize("case", ["mean", "gate half int8", "softmax int8", "relu", "sparse",
                                  "window int8", "read full"])  # fmt: skip
def test_pytorch_accepts_the_operator(case: str) -> None:
    """opcheck: schema, no mutation, no aliases, fake tensors, export with dynamic shapes."""
    site = SITES[case]
    torch.library.opcheck(
        site.operator.torch_op._opoverload, tuple(inputs_of(site).values()), site.attributes
    )


@pytest.mark.parametrize("case", SITES)
def test_inferred_types_are_those_of_the_outputs(case: str) -> None:
    """Shape inference on the bare node: dynamic sizes keep their names, outputs match PyTorch's."""
    site = SITES[case]
    bare = model(site, form="")
    for output in bare.graph.output:
        output.ClearField("type")
    register_schemas()
    inferred = shape_inference.infer_shapes(bare, strict_mode=True, check_type=True)
    inputs = inputs_of(site)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in inputs.values()]
        outputs = site.operator.torch_op(*fake, **site.attributes)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sizes = {"B": 2, "S": 6, "MP": 3, "NP": 7}
    for value, output in zip(inferred.graph.output, outputs, strict=True):
        tensor = value.type.tensor_type
        shape = [x.dim_value or sizes[x.dim_param] for x in tensor.shape.dim]
        assert shape == list(output.shape)
        assert tensor.elem_type == ELEMENTS[output.dtype]
        assert all(x.dim_param or x.dim_value for x in tensor.shape.dim)


@pytest.mark.parametrize(
    "change, message",
    [
        (("keys", [2, 6, 2]), "input 'keys' has 3 axes, not 4"),
        (("index_pool", [2, 7, 4, 9]), "input 'index_pool' has size 9 on axis 3, not 8"),
        (("tail", [2, 5, 2, 2, 8]), "input 'tail' has size 5 on axis 1, not 4"),
    ],
)
def test_shape_inference_names_what_does_not_fit(change: tuple, message: str) -> None:
    bare = model(SITES["mean"], form="")
    name, shape = change
    value = next(x for x in bare.graph.input if x.name == name)
    value.CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    register_schemas()
    with pytest.raises(shape_inference.InferenceError, match=message):
        shape_inference.infer_shapes(bare, strict_mode=True, check_type=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["mean int8", "gate half int8", "softmax int8", "relu", "sparse",
                                  "sparse half int8", "window", "read full"])  # fmt: skip
def test_models_with_functions_are_valid_and_standard(case: str, form: str) -> None:
    """The checker accepts them, and inlined there is nothing but standard operators."""
    attached = model(SITES[case], form)
    onnx.checker.check_model(attached, full_check=True)
    inlined = onnx.inliner.inline_local_functions(attached)
    assert not inlined.functions
    used = list(nodes(inlined.graph))
    assert {x.domain for x in used} <= {"", "ai.onnx"}
    assert "MatMulInteger" not in {x.op_type for x in used}
    assert ("If" in {x.op_type for x in used}) == (form == "auto" and case not in IF_FREE)


IF_FREE = {"mean int8", "gate half int8", "window", "read full"}  # one way for any lengths


def nodes(graph: onnx.GraphProto):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes(attribute.g)


def two_sites() -> onnx.ModelProto:
    """Three nodes of one operator, two of which agree in everything that a body depends on."""
    first, second = model(SITES["softmax"], ""), model(SITES["softmax, no window"], "")
    third = model(SITES["softmax"], "")
    graph, same = first.graph, {"page_table", "past_len", "new_len"}
    for i, other in enumerate((second, third)):
        for value in (*other.graph.input, *other.graph.output):
            if value.name not in same:
                value.name += str(i)
        node = other.graph.node[0]
        node.name += str(i)
        for names in (node.input, node.output):
            names[:] = [x if x in same else x + str(i) for x in names]
        graph.node.append(node)
        graph.input.extend(x for x in other.graph.input if x.name not in same)
        graph.output.extend(other.graph.output)
    return first


def test_sites_that_agree_share_a_function() -> None:
    attached = two_sites()
    attach_functions(attached)
    assert [x.name for x in attached.functions] == ["IndexPoolSelect", "IndexPoolSelect_2"]
    kinds = [x.op_type for x in attached.graph.node]
    assert kinds == ["IndexPoolSelect", "IndexPoolSelect_2", "IndexPoolSelect"]
    onnx.checker.check_model(attached, full_check=True)


def test_attaching_is_deterministic() -> None:
    """In another process too, with other hash seeds."""
    code = (
        "import hashlib, sys; from tests.ops.test_registry import *; m = two_sites();"
        "attach_functions(m); sys.stdout.write(hashlib.sha256(m.SerializeToString()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    }
    assert len(digests) == 1


def test_a_size_that_is_not_fixed_is_named() -> None:
    bare = model(SITES["sparse"], form="")
    value = next(x for x in bare.graph.input if x.name == "q")
    value.type.tensor_type.shape.dim[2].dim_param = "heads"
    with pytest.raises(ValueError, match="size H of 'q' is not fixed"):
        attach_functions(bare)
    with pytest.raises(ValueError, match="form 'best' is not one of auto, gather, mask"):
        attach_functions(bare, "best")


def test_the_document_is_up_to_date() -> None:
    """`python -m edgepool.ops.document` writes it."""
    found = resources.resource("export", "opset.md").read_text(encoding="utf-8")
    assert found == document()
