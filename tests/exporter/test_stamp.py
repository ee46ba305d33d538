"""A graph stamped from few layers is, node by node, the graph of tracing them all."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from edgepool.config import STEP_INPUTS, IndexConfig, state_specs
from edgepool.exporter.graph import trace_model
from edgepool.exporter.simplify import simplify
from edgepool.exporter.stamp import model_skeleton, representatives, with_layers

from .models import MIXED, SPARSE, config

TWELVE = dict(
    layer_types=("window",) * 4 + ("keypoints",) * 4 + ("sparse",) * 4,
    kv_donor=(0, 1, 2, 2, 4, 5, 5, 5, 8, 9, 10, 8),
    tie_embeddings=False,
    index=IndexConfig(top_k=32, share=(0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 10, 10)),
)
LIKE_SMOLLM3 = dict(
    layer_types=("full",) * 8, rope_layers=(True, True, True, False) * 2, kv_dtype="int8"
)


@pytest.mark.parametrize(
    ("kind", "traced"),
    [({**SPARSE, "layer_types": ("sparse",) * 5}, 1), (TWELVE, 10), (LIKE_SMOLLM3, 2)],
    ids=["sparse", "twelve", "smollm3"],
)
def test_stamped_is_traced(kind: dict, traced: int) -> None:
    c = config(**kind)
    assert len(representatives(c)) == traced < c.num_layers
    stamped = model_skeleton(c, torch.float32)
    whole = simplify(trace_model(c, torch.float32), len(STEP_INPUTS) + len(state_specs(c)))
    mine = ir.serde.serialize_model(stamped.model).graph
    theirs = ir.serde.serialize_model(whole.model).graph
    assert list(mine.node) == list(theirs.node)
    assert list(mine.initializer) == list(theirs.initializer)
    assert list(mine.input)[: stamped.inputs] == list(theirs.input)[: whole.inputs]
    assert list(mine.output) == list(theirs.output)
    for field in ("input", "value_info"):
        values = [sorted(v.SerializeToString() for v in getattr(g, field)) for g in (mine, theirs)]
        assert values[0] == values[1]
    assert stamped.transposed == whole.transposed


def test_where_every_layer_is_of_its_own_kind_all_are_traced() -> None:
    c = config(**MIXED)
    assert with_layers(c, representatives(c)) is None
