"""Does parity notice? Faults are planted in the exported graph, each small, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from edgepool.bundle import Bundle
from edgepool.checkpoint import load
from edgepool.errors import GateFailed
from edgepool.exporter import by_layer, parity
from edgepool.exporter.probe import Probe, cut, hidden_states, read_graph, selections, watch
from edgepool.exporter.schedule import plan
from edgepool.model import Model

from .models import FULL, SPARSE, config


def scaled(kind: str, index: int, factor: float) -> Callable[[onnx.ModelProto], None]:
    """Multiply what the first node of a kind reads."""

    def plant(graph: onnx.ModelProto) -> None:
        nodes = graph.graph.node
        place, node = next((i, n) for i, n in enumerate(nodes) if n.name.endswith(kind))
        constant = onnx.numpy_helper.from_array(np.array(factor, np.float32), "factor")
        graph.graph.initializer.append(constant)
        made = onnx.helper.make_node("Mul", [node.input[index], "factor"], ["scaled"])
        node.input[index] = "scaled"
        nodes.insert(place, made)

    return plant


def rewire(kind: str, index: int, other: Callable[[onnx.NodeProto], str]) -> Callable[..., None]:
    """Let the first node of a kind read something else."""

    def plant(graph: onnx.ModelProto) -> None:
        node = next(n for n in graph.graph.node if n.name.endswith(kind))
        node.input[index] = other(node)

    return plant


def norm_skipped(graph: onnx.ModelProto) -> None:
    """Scale what a norm is given in place of what it computes."""
    norm = [n for n in graph.graph.node if n.name.startswith("layers.2.mlp_norm/")]
    norm[-1].input[1] = norm[0].input[0]


FAULTS = {
    "queries scaled": scaled("layers.3/SharedKVAttention", 0, 1.02),
    "keys for values": rewire("/SharedKVAttention", 2, lambda n: n.input[1]),
    "norm skipped": norm_skipped,
    "positions from 0": rewire("/Add", 0, lambda n: n.input[1]),
    "residual twice": rewire("layers.3/Add_2", 1, lambda n: n.input[0]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault: str, mixed: Path) -> None:
    folder = mixed / "edgepool-bundle"
    checkpoint = load(mixed / "model.pt")
    graph = read_graph(folder / "model.onnx")
    FAULTS[fault](graph)
    model = Model.from_checkpoint(checkpoint)
    schedule = plan(checkpoint.config, [], decode=4)
    outcome = parity.compare(graph, folder, parity.steps_of(model, schedule), "fp32")
    with pytest.raises(GateFailed, match="not equal to PyTorch"):
        outcome.require("model.onnx")
    short = by_layer.short_plan(checkpoint.config, [])
    outcome = by_layer.compare(graph, folder, checkpoint, short, "fp32")
    with pytest.raises(GateFailed, match="not equal to PyTorch"):
        outcome.require("model.onnx")


def test_states_exchanged_between_layers(mixed: Path) -> None:
    """Layer 0 reads layer 1's pages: hidden by zero pages, so more than one step has to be run."""
    folder = mixed / "edgepool-bundle"
    checkpoint = load(mixed / "model.pt")
    graph = read_graph(folder / "model.onnx")
    exchanged = {"k_pool.0": "k_pool.1", "k_pool.1": "k_pool.0"}
    for node in graph.graph.node:
        node.input[:] = [exchanged.get(name, name) for name in node.input]
    model = Model.from_checkpoint(checkpoint)
    schedule = plan(checkpoint.config, [], decode=2)
    outcome = parity.compare(graph, folder, parity.steps_of(model, schedule), "fp32")
    with pytest.raises(GateFailed):
        outcome.require("model.onnx")


def test_layer_by_layer_runs_the_model_itself(mixed: Path) -> None:
    """PyTorch one layer at a time gives, bit by bit, what the whole model gives."""
    folder = mixed / "edgepool-bundle"
    checkpoint = load(mixed / "model.pt")
    schedule = by_layer.short_plan(checkpoint.config, [])
    steps: list[parity.Reference] = []
    outcome = by_layer.compare(
        read_graph(folder / "model.onnx"), folder, checkpoint, schedule, "fp32", seen=steps.append
    )
    outcome.require("model.onnx")
    assert outcome.steps == checkpoint.config.num_layers
    assert outcome.selections > 0
    model = Model.from_checkpoint(checkpoint)
    for mine, theirs in zip(steps, parity.reference_steps(model, schedule), strict=True):
        for a, b in zip(mine.hidden, theirs.hidden, strict=True):
            np.testing.assert_array_equal(a, b)
        for x, y in zip(mine.updated, theirs.updated, strict=True):
            assert torch.equal(x, y)
        np.testing.assert_allclose(mine.logits, theirs.logits, atol=1e-6)


def test_flips_are_counted() -> None:
    mine = np.array([[[[0, 2, 5, -1]], [[1, 2, -1, -1]]]])
    theirs = np.array([[[[0, 3, 5, -1]], [[1, 2, -1, -1]]]])
    assert parity.selection_flips(mine, theirs) == (1, 5)
    assert parity.selection_flips(theirs, theirs) == (0, 5)


def test_nan_never_passes() -> None:
    one = np.zeros(3, np.float32)
    two = np.array([0, np.nan, 0], np.float32)
    assert parity.largest_difference(one, two) == np.inf
    assert parity.largest_difference(two, two) == np.inf
    assert parity.largest_difference(np.zeros(0), np.zeros(0)) == 0
    assert parity.relative_difference(two, one) == np.inf


def test_greedy_ties() -> None:
    theirs = np.array([[[1.0, 0.9995, 0.0]], [[1.0, 0.5, 0.0]]])
    mine = np.array([[[0.0, 1.0, 0.0]], [[0.0, 1.0, 0.0]]])
    assert parity.greedy_differences(mine, theirs, 2e-3) == 1


@pytest.mark.parametrize("limit", ["logit", "greedy", "selections", "stored", "layer"])
def test_every_limit_is_enforced(limit: str) -> None:
    outcome = parity.Outcome.of("fp32")
    outcome.selections = outcome.stored = 10_000
    outcome.require("x")
    change = {
        "logit": ("max_logit_difference", 1.1e-3),
        "greedy": ("greedy_differences", 1),
        "selections": ("selection_flips", 11),
        "stored": ("stored_flips", 11),
        "layer": ("max_layer_difference", 1.1e-4),
    }[limit]
    setattr(outcome, *change)
    with pytest.raises(GateFailed):
        outcome.require("x")


@pytest.mark.parametrize("kind", [SPARSE, FULL], ids=["sparse", "full"])
def test_the_schedule_is_ragged_and_chunked(kind: dict) -> None:
    c = config(**kind)
    schedule = plan(c, [])
    assert len({len(prompt) for prompt in schedule.prompts}) == 3
    past = np.zeros(3, np.int32)
    for step in schedule.prefill:
        np.testing.assert_array_equal(step.past_len, past)
        for b, prompt in enumerate(schedule.prompts):
            count = int(step.new_len[b])
            assert tuple(step.input_ids[b, :count]) == prompt[past[b] : past[b] + count]
        past = past + step.new_len
    assert tuple(past) == tuple(map(len, schedule.prompts))
    assert any((step.new_len == 0).any() for step in schedule.prefill)
    used = schedule.page_table[schedule.page_table > 0]
    assert sorted(used) == list(range(1, schedule.pages))
    late = [schedule.prefill[i] for i in schedule.excerpt]
    assert len(late) == 3
    if kind is SPARSE:
        attended = max(c.attended_tokens(i, c.max_context) for i in range(c.num_layers))
        assert len(schedule.prompts[0]) > attended + c.page_size
        assert late[0].past_len[0] + late[0].new_len[0] > attended
    assert len(schedule.prompts[0]) + schedule.decode <= c.max_context


def test_a_cut_computes_what_the_whole_does(mixed: Path) -> None:
    folder = mixed / "edgepool-bundle"
    c = Bundle.open(folder).config
    graph = read_graph(folder / "model.onnx")
    assert hidden_states(graph) == [f"hidden.{i}" for i in range(6)]
    assert len(selections(graph)) == 2
    part = cut(graph, ["hidden.3"], {"hidden.2"})
    assert len(part.graph.node) < len(graph.graph.node) / 3
    watch(graph, ["hidden.2", "hidden.3"])
    whole = Probe(graph, folder)
    schedule = plan(c, [], decode=0)
    values = parity.step_inputs(schedule, schedule.prefill[0])
    rng = np.random.default_rng(0)
    sizes = {"batch": 3, "pages": schedule.pages}
    for name, kind in whole.inputs.items():
        if name not in values:
            shape = [sizes.get(n, n) for n in whole.shapes[name]]
            values[name] = (rng.standard_normal(shape) * 9).astype(kind)
    got = whole.run(values)
    alone = Probe(part, folder).run({**values, "hidden.2": got["hidden.2"]})
    np.testing.assert_allclose(alone["hidden.3"], got["hidden.3"], atol=1e-5)
