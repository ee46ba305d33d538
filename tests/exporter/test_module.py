"""`edgepool.export_module`, and the example in docs/export-module.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper
from torch import nn

import edgepool
from edgepool.errors import BadInput, GateFailed
from edgepool.exporter.lower import check_operators, for_plugins, parser_operators, portable

DOC = Path(__file__).resolve().parents[2] / "docs" / "export-module.md"


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the page's code, then ten frames in PyTorch and ONNX Runtime beside each other."""
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S):
        exec(compile(block, str(DOC), "exec"), scope)
    memory = list(scope["empty_memory"](2, 33))
    for number in range(10):
        frame = torch.from_numpy(
            np.random.default_rng(number).standard_normal((2, 3, 32, 48), np.float32)
        )
        seen = torch.full((2,), number * 24, dtype=torch.int32)
        with torch.no_grad():
            features, *memory = scope["encoder"](frame, scope["page_table"], seen, *memory)
    np.testing.assert_allclose(scope["features"], features.numpy(), atol=1e-4)
    for mine, theirs in zip(scope["memory"], memory):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-5)

    xavier = onnx.load("encoder.xavier.onnx")
    assert {x.domain: x.version for x in xavier.opset_import} == {"": 17, "edgepool": 1}
    standard = {node.op_type for node in xavier.graph.node if not node.domain}
    assert standard <= set(parser_operators("tensorrt-8.5"))
    assert not standard & {"LayerNormalization", "Gelu"}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.drop = nn.Dropout(0.9)

    def forward(self, x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
        return self.drop(x * self.weight + more[0] - more[1])


def test_names_and_training_mode(tmp_path: Path) -> None:
    module = Scaled().train()
    inputs = (torch.randn(2, 3), [torch.randn(2, 3), torch.randn(2, 3)])
    shapes = ({0: "n"}, [{0: "n"}, {0: "n"}])
    path = edgepool.export_module(module, inputs, shapes, tmp_path / "scaled.onnx")
    assert module.training
    assert module.drop.training
    graph = onnx.load(path).graph
    assert [x.name for x in graph.input] == ["x", "more.0", "more.1"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"
    assert [x.name for x in graph.output] == ["output"]
    assert [x.name for x in graph.initializer] == ["weight"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["scaled.onnx"]


def test_one_tensor_given_twice_stays_two_inputs(tmp_path: Path) -> None:
    same = torch.randn(2, 3)
    shapes = ({0: "n"}, [{0: "n"}, {0: "n"}])
    path = edgepool.export_module(Scaled(), (same, [same, same]), shapes, tmp_path / "s.onnx")
    nodes = onnx.load(path).graph.node
    read = {name for node in nodes for name in node.input}
    assert {"x", "more.0", "more.1"} <= read


class Unequal(nn.Module):
    """Gives another result at every call, so that no export of it can be equal."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


def test_a_difference_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match="differs by"):
        edgepool.export_module(Unequal(), (torch.zeros(2, 3),), ({0: "n"},), tmp_path / "u.onnx")
    assert not list(tmp_path.iterdir())


class DependsOnData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_traced_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be exported") as caught:
        edgepool.export_module(
            DependsOnData(), (torch.ones(2, 3),), ({0: "n"},), tmp_path / "d.onnx"
        )
    assert "\n" not in str(caught.value)


class Branching(nn.Module):
    """Both branches hold operators that opset 17 writes in another form."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = lambda x: (x * x.mean(-1, keepdim=True),)  # noqa: E731
        bent = lambda x: (nn.functional.gelu(x),)  # noqa: E731
        return torch.cond(x.sum() > 0, mean, bent, (x,))[0]


@pytest.mark.parametrize("sign", [1, -1])
def test_branches_are_lowered_too(tmp_path: Path, sign: int) -> None:
    x = sign * torch.rand(2, 3, 8)
    path = tmp_path / "branching.onnx"
    edgepool.export_module(Branching(), (x,), None, path, target="jetson-agx-xavier")
    model = onnx.load(path)
    (choice,) = [node for node in model.graph.node if node.op_type == "If"]
    branches = [attribute.g for attribute in choice.attribute]
    assert not {node.op_type for graph in branches for node in graph.node} & {"Gelu"}
    with pytest.raises(BadInput, match="does not know (ReduceMean|Erf)"):
        check_operators(model, {node.op_type for node in model.graph.node} | {"Mul"})


def test_an_operator_in_a_branch_is_refused() -> None:
    pool = helper.make_node("IndexPool", [], ["y"], name="inner", domain="edgepool")
    branch = helper.make_graph([pool], "branch", [], [onnx.ValueInfoProto(name="y")])
    choice = helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch)
    x = helper.make_tensor_value_info("x", onnx.TensorProto.BOOL, [])
    graph = helper.make_graph([choice], "g", [x], [onnx.ValueInfoProto(name="z")])
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("edgepool", 1)]
    model = ir.serde.deserialize_model(helper.make_model(graph, opset_imports=imports))
    for lowered in (portable, for_plugins):
        with pytest.raises(BadInput, match="node 'inner': IndexPool stands in a branch or loop"):
            lowered(model)
