"""TensorRT's own plugin registry and ONNX parser, those of TensorRT-RTX, with the plugin library.

The parser finds the creator of each node of an exported graph and creates the plugin from the
node's attributes. Then TensorRT-RTX, which runs no plugins, ends the process, so a child does it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from onnx import AttributeProto, NodeProto, TensorProto, helper

from edgepool import plugins_build
from edgepool.exporter import lower
from edgepool.exporter.stamp import model_skeleton
from edgepool.ops.registry import DOMAIN, Operator, operators
from edgepool.plugin_library import NAME
from edgepool.targets import find_target
from tests.exporter.models import MIXED, config
from tests.plugins import toolchain
from tests.plugins.conformance import build

pytest.importorskip("tensorrt_rtx_bindings")
CHILD = Path(__file__).with_name("registry_child.py")
TYPES = {
    "T": TensorProto.FLOAT,
    "P": TensorProto.INT8,
    "float32": TensorProto.FLOAT,
    "int32": TensorProto.INT32,
}


@pytest.fixture(scope="module", params=["emulated", pytest.param("nvcc", marks=pytest.mark.slow)])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library for the emulation, and the one that nvcc compiles for an Orin."""
    if request.param == "emulated":
        return build.plugin_library("plain", 3)
    toolchain.tool("nvcc")
    folder = tmp_path_factory.mktemp("nvcc")
    plugins_build.build(87, folder)
    return folder / NAME


@pytest.fixture(scope="module")
def nodes() -> dict[str, NodeProto]:
    """A node of each operator, as `export --target jetson-agx-orin` writes it."""
    target = find_target("jetson-agx-orin")
    known = lower.parser_operators(target.operators) if target.operators else ()
    model = lower.for_plugins(
        model_skeleton(config(**MIXED), torch.float32).model, target.opset, known
    )
    return {node.op_type: node for node in model.graph.node if node.domain == DOMAIN}


def alone(node: NodeProto) -> onnx.ModelProto:
    """A graph of this node only. Sizes are open, and what the node does not use is a constant."""
    operator: Operator = operators()[node.op_type]
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    inputs, constants, copy = [], [], NodeProto()
    copy.CopyFrom(node)
    del copy.input[:], copy.output[:]
    for argument in operator.inputs:
        copy.input.append(argument.name)
        if is_unused(argument.unused, values):
            kind = TYPES[argument.type]
            constants.append(helper.make_tensor(argument.name, kind, [1], [0]))
            continue
        shape = [values.get(size, size) for size in argument.shape]
        value = helper.make_tensor_value_info(argument.name, TYPES[argument.type], shape)
        inputs.append(value)
    outputs = []
    for argument in operator.outputs:
        copy.output.append(argument.name)
        shape = [values.get(size, size) for size in argument.shape]
        outputs.append(helper.make_tensor_value_info(argument.name, TYPES[argument.type], shape))
    graph = helper.make_graph([copy], "alone", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def is_unused(condition: str, values: dict[str, object]) -> bool:
    """registry.Argument.unused of a node with INT8 pages: `mean`, `softmax`, `fuse = 0`, ..."""
    if condition in ("", "P = T"):
        return False
    name, _, number = condition.partition(" = ")
    return (
        values.get(name) == int(number) if number else name.strip("`").encode() in values.values()
    )


def wrong(attribute: AttributeProto) -> AttributeProto:
    """The attribute with a value that no operator takes."""
    if attribute.type == AttributeProto.STRING:
        return helper.make_attribute(attribute.name, "absurd")
    value = -7 if attribute.type == AttributeProto.INT else float("nan")
    return helper.make_attribute(attribute.name, value)


def child(*arguments: object) -> tuple[int, list[dict], str]:
    """Exit code, what it printed, and stderr."""
    run = subprocess.run(
        [sys.executable, str(CHILD), *map(str, arguments)], capture_output=True, text=True
    )
    return run.returncode, [json.loads(line) for line in run.stdout.splitlines()], run.stderr


def test_the_registry_lists_the_creators(library: Path) -> None:
    code, said, errors = child(library, "creators")
    assert code == 0, errors
    listed = {tuple(line["creator"]): line["fields"] for line in said if "creator" in line}
    assert listed == {
        (DOMAIN, name, "1"): [a.name for a in operator.attributes]
        for name, operator in operators().items()
    }


def test_an_exported_graph_has_every_operator(nodes: dict[str, NodeProto]) -> None:
    assert set(nodes) == set(operators())


@pytest.mark.parametrize("name", operators())
def test_the_parser_creates_the_plugin(
    library: Path, nodes: dict[str, NodeProto], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(alone(nodes[name]), path)
    code, said, errors = child(library, "parse", path)
    logs = [line["log"] for line in said if "log" in line]
    assert "Successfully created plugin: " + name in logs
    assert code < 0  # it was ended, or TensorRT-RTX runs plugins now: then this test can do more
    assert not [line for line in errors.splitlines() if line.startswith(name)]


def with_wrong_attributes(node: NodeProto) -> Iterator[tuple[str, NodeProto]]:
    for i, attribute in enumerate(node.attribute):
        if attribute.name in lower.PLUGIN_ATTRIBUTES:
            continue
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.attribute[i].CopyFrom(wrong(attribute))
        yield attribute.name, copy


@pytest.mark.parametrize("name", operators())
def test_the_plugin_gets_the_attributes_of_the_node(
    library: Path, nodes: dict[str, NodeProto], name: str, tmp_path: Path
) -> None:
    """A wrong value comes back in the plugin's message, and the parser refuses the node."""
    paths = []
    names = []
    for attribute, node in with_wrong_attributes(nodes[name]):
        node.name = "layer_" + attribute
        paths.append(tmp_path / (attribute + ".onnx"))
        names.append(attribute)
        onnx.save(alone(node), paths[-1])
    code, said, errors = child(library, "parse", *paths)
    assert code == 0, errors
    assert [line["parsed"] for line in said if "parsed" in line] == [False] * len(paths)
    messages = [line for line in errors.splitlines() if line.startswith(name)]
    assert len(messages) == len(names) > 2
    for attribute, message in zip(names, messages):
        begins = "%s (layer 'layer_%s'): attribute %s: expected" % (name, attribute, attribute)
        assert message.startswith(begins)
        assert message.endswith(("got -7", "got 'absurd'", "got nan", "got -nan"))


def test_a_node_without_an_attribute_is_refused(
    library: Path, nodes: dict[str, NodeProto], tmp_path: Path
) -> None:
    node = NodeProto()
    node.CopyFrom(nodes["IndexPool"])
    kept = [a for a in node.attribute if a.name != "ratio"]
    del node.attribute[:]
    node.attribute.extend(kept)
    onnx.save(alone(node), tmp_path / "model.onnx")
    code, said, errors = child(library, "parse", tmp_path / "model.onnx")
    assert (code, said[-1]["parsed"]) == (0, False)
    assert "attribute ratio: expected one integer, it is missing" in errors
