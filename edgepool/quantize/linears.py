"""The linear layers of an exported graph, by the value that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

SUFFIX = ".weight"
EMBEDDING = "embed.weight"
HEAD = "lm_head"  # also the name of a head that reads the embedding table


@dataclass(frozen=True)
class Linear:
    """A MatMul or Gemm with a weight.

    name is the module's path (`layers.0.q_proj`); value is the graph value that the node reads;
    turned: the weight is stored [out, in], as Gemm takes it, else [in, out].
    """

    name: str
    node: str
    weight: str
    value: str
    turned: bool


@dataclass(frozen=True)
class Group:
    """The linears that read one value, and so share its scale; named after the first of them."""

    value: str
    linears: tuple[Linear, ...]

    @property
    def name(self) -> str:
        return self.linears[0].name


def groups(graph: onnx.GraphProto) -> list[Group]:
    """All linears of a graph of ours, in its order. Weights are initialisers or graph inputs."""
    produced = {name for node in graph.node for name in node.output}
    found: dict[str, list[Linear]] = {}
    for node in graph.node:
        if node.domain or node.op_type not in ("MatMul", "Gemm"):
            continue
        weight = node.input[1]
        if weight in produced or not weight.endswith(SUFFIX):
            continue
        name = HEAD if weight == EMBEDDING else weight[: -len(SUFFIX)]
        linear = Linear(name, node.name, weight, node.input[0], node.op_type == "Gemm")
        found.setdefault(linear.value, []).append(linear)
    return [Group(value, tuple(linears)) for value, linears in found.items()]


def by_name(found: Sequence[Group]) -> dict[str, Group]:
    """Groups by the name of each of their linears."""
    return {linear.name: group for group in found for linear in group.linears}
