"""A deep model's graph from a shallow one's: layers of the same kind have the same nodes.

torch.export takes seconds for every layer, and thirty equal layers differ in names alone. So one
layer of each kind is traced, and its nodes are repeated under the names of the others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable

import onnx
import onnx_ir as ir
import torch

from ..config import STEP_INPUTS, ModelConfig, state_specs
from .graph import OPSET, trace_model
from .simplify import Skeleton, simplify

STATE = re.compile(r"(\w+)\.(\d+)(_out)?$")
LAYER = re.compile(r"layers\.(\d+)([./].*)$")


def model_skeleton(config: ModelConfig, dtype: torch.dtype, opset: int = OPSET) -> Skeleton:
    """The simplified graph of a model, with outputs `hidden.I` last; weights are inputs."""
    layers = representatives(config)
    shallow = with_layers(config, layers)
    if shallow is None:
        layers, shallow = list(range(config.num_layers)), config
    model = trace_model(shallow, dtype, opset)
    skeleton = simplify(model, len(STEP_INPUTS) + len(state_specs(shallow)))
    if shallow is config:
        return skeleton
    return stamped(skeleton, config, shallow, layers)


def kind(config: ModelConfig, layer: int) -> tuple[object, ...]:
    """Layers of the same kind have the same nodes. (The first keypoints layer finds the blocks.)"""
    c = config
    return (
        c.layer_types[layer],
        c.layer_types[layer] == "keypoints" and "keypoints" not in c.layer_types[:layer],
        c.is_donor(layer),
        c.owns_index(layer),
        c.selects(layer),
        c.rope_layers[layer],
    )


def representatives(config: ModelConfig) -> list[int]:
    """The first layer of each kind, and the donors and selections that these need."""
    first: dict[object, int] = {}
    for i in range(config.num_layers):
        first.setdefault(kind(config, i), i)
    needed = set(first.values())
    for i in list(needed):
        needed |= {config.kv_donor[i], config.index.share[i]}
    return sorted(needed)


def with_layers(config: ModelConfig, layers: list[int]) -> ModelConfig | None:
    """The configuration with these layers only; None where that would change their kinds."""
    place = {layer: i for i, layer in enumerate(layers)}
    needed = {config.kv_donor[i] for i in layers} | {config.index.share[i] for i in layers}
    if not needed <= set(place):
        return None
    share = tuple(place[config.index.share[i]] for i in layers)
    shallow = dataclasses.replace(
        config,
        num_layers=len(layers),
        layer_types=tuple(config.layer_types[i] for i in layers),
        kv_donor=tuple(place[config.kv_donor[i]] for i in layers),
        rope_layers=tuple(config.rope_layers[i] for i in layers),
        index=dataclasses.replace(config.index, share=share),
    )
    same = all(kind(shallow, place[i]) == kind(config, i) for i in layers)
    return shallow if same and len(layers) < config.num_layers else None


def stamped(
    skeleton: Skeleton, config: ModelConfig, shallow: ModelConfig, layers: list[int]
) -> Skeleton:
    """The graph of `config` from that of `shallow`, which has its `layers`."""
    graph = ir.serde.serialize_model(skeleton.model).graph
    place = {kind(config, layer): i for i, layer in reversed(list(enumerate(layers)))}
    source = [
        layers.index(i) if i in layers else place[kind(config, i)] for i in range(config.num_layers)
    ]
    embedded = next(n.output[0] for n in graph.node if "embed.weight" in n.input)

    def names(layer: int) -> Callable[[str], str]:
        """From the names in the shallow graph's layer to those in `layer`."""
        place = source[layer]
        outer = {
            place: layer,
            shallow.kv_donor[place]: config.kv_donor[layer],
            shallow.index.share[place]: config.index.share[layer],
        }

        def renamed(name: str) -> str:
            if name == (f"hidden.{place - 1}" if place else embedded):
                return f"hidden.{layer - 1}" if layer else embedded
            inner, state = LAYER.match(name), STATE.match(name)
            if inner:
                other = int(inner[1])
                return f"layers.{outer.get(other, layers[other])}{inner[2]}"
            if state:
                return f"{state[1]}.{outer[int(state[2])]}{state[3] or ''}"
            return name

        return renamed

    blocks: dict[int, list[onnx.NodeProto]] = {}
    before: list[onnx.NodeProto] = []
    after: list[onnx.NodeProto] = []
    for node in graph.node:
        scope = LAYER.match(node.name)
        if scope:
            blocks.setdefault(int(scope[1]), []).append(node)
        else:
            (after if blocks else before).append(node)

    model = onnx.ModelProto()
    result = model.graph
    result.name = graph.name
    result.initializer.extend(graph.initializer)
    known = {v.name: v for v in (*graph.input, *graph.value_info, *graph.output)}
    values: dict[str, onnx.ValueInfoProto] = {}

    def add(nodes: Iterable[onnx.NodeProto], rename: Callable[[str], str]) -> None:
        for node in nodes:
            copy = result.node.add()
            copy.CopyFrom(node)
            copy.name = rename(node.name)
            for field in (copy.input, copy.output):
                field[:] = [rename(name) for name in field]
            for old, new in zip((*node.input, *node.output), (*copy.input, *copy.output)):
                if old in known and new not in values:
                    values[new] = onnx.ValueInfoProto()
                    values[new].CopyFrom(known[old])
                    values[new].name = new

    last = names(config.num_layers - 1)
    add(before, lambda name: name)
    for layer in range(config.num_layers):
        add(blocks[source[layer]], names(layer))
    end = f"hidden.{shallow.num_layers - 1}"
    add(after, lambda name: last(f"hidden.{source[-1]}") if name == end else name)

    specs = [spec.name for spec in state_specs(config)]
    inputs = [*STEP_INPUTS, *specs]
    produced = {name for node in result.node for name in node.output}
    constants = {tensor.name for tensor in graph.initializer}
    read = dict.fromkeys(name for node in result.node for name in node.input)
    weights = [n for n in read if n not in produced | constants | set(inputs)]
    outputs = ["logits", *(f"{name}_out" for name in specs)]
    outputs += [f"hidden.{i}" for i in range(config.num_layers)]
    result.input.extend(values[name] for name in (*inputs, *weights))
    result.output.extend(values[name] for name in outputs)
    listed = {*inputs, *weights, *outputs}
    result.value_info.extend(value for name, value in values.items() if name not in listed)
    model.ir_version = skeleton.model.ir_version
    model.opset_import.extend(ir.serde.serialize_model(skeleton.model).opset_import)
    turned = {name for name in weights if _shallow_name(name, source) in skeleton.transposed}
    return Skeleton(ir.serde.deserialize_model(model), len(inputs), turned)


def _shallow_name(weight: str, source: list[int]) -> str:
    """The name in the shallow graph of a weight of the deep one."""
    inner = LAYER.match(weight)
    return f"layers.{source[int(inner[1])]}{inner[2]}" if inner else weight
