"""Parity of a model that is too large to be in memory twice: one layer at a time.

PyTorch runs all steps through one layer, then through the next, with the weights of one layer in
memory. ONNX Runtime runs the same layer, cut out of the exported graph with the weights referenced
where they are on disk, on PyTorch's inputs: its hidden states, pages and selections. So every layer
is judged alone, and nothing of the file is left out.

Two tracks of steps go through: a short prompt from its beginning, and a few tokens at the end of a
long context whose pages hold random numbers, so that sparse layers have to choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from ..checkpoint import Checkpoint
from ..config import ModelConfig, StateSpec, state_specs
from ..model import Model, new_state
from ..model.layer import Layer
from ..model.step import Step as Shared
from ..progress import Report, silent
from .half import HalfLayers, in_half
from .parity import (
    Observe,
    Outcome,
    Recorder,
    Reference,
    measure_state,
    relative_difference,
    step_inputs,
)
from .probe import FED, Probe, cut, feed, selections
from .schedule import Schedule, Step, plan
from .weights import release

SHORT, LONG = 96, 16384  # tokens of the prompt; most tokens of the long context
AFTER = 6  # tokens that are run behind the long context
LOGIT_BLOCK = 8192  # rows of the LM head at a time


@dataclass
class Track:
    """Steps over one page table, what flows between layers, and what came out."""

    schedule: Schedule
    steps: list[Step]
    random_state: bool
    x: list[Tensor] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    first: list[dict[str, Tensor]] = field(default_factory=list)
    hidden: list[list[np.ndarray]] = field(default_factory=list)


def short_plan(config: ModelConfig, text_ids: list[int]) -> Schedule:
    """The prompt of the first track."""
    return plan(config, text_ids, decode=0, longest=SHORT)


@torch.no_grad()
def compare(
    graph: onnx.ModelProto,
    folder: Path,
    checkpoint: Checkpoint,
    schedule: Schedule,
    dtype: str,
    report: Report = silent,
    seen: Callable[[Reference], None] = lambda reference: None,
    observe: Observe = lambda mine, theirs: None,
    half: HalfLayers | None = None,
) -> Outcome:
    """Compare every layer of a graph (from `probe.read_graph`) with PyTorch.

    seen is called with the steps of the first track; observe with what every layer and the LM head
    give in every step, and with a layer's state after the last. half judges all steps in float16.
    """
    config = checkpoint.config
    tracks = [_prompt_track(schedule), *_long_track(config)]
    outcome = Outcome.of(dtype, by_layer=True)
    outcome.tokens = sum(int(step.new_len.sum()) for track in tracks for step in track.steps)
    outcome.steps = config.num_layers
    if half is not None:
        half.outcome.tokens, half.outcome.steps = outcome.tokens, outcome.steps
    names = dict(zip(filter(config.selects, range(config.num_layers)), selections(graph)))
    fed = onnx.ModelProto()
    fed.CopyFrom(graph)
    feed(fed, list(names.values()))
    with torch.device("meta"):
        model = Model(config)
    for track in tracks:
        _begin(track, model, checkpoint.weights)
    for layer in range(config.num_layers):
        _load(model.layers[layer], f"layers.{layer}.", checkpoint.weights)
        if half is not None:
            with torch.device("meta"):
                half.layer = Layer(config, layer)
            _load(half.layer, f"layers.{layer}.", checkpoint.weights, torch.float16)
        probe = _layer_probe(fed, folder, config, layer, names)
        for track in tracks:
            one = (track, model.layers[layer], layer, config, probe, names, outcome, observe, half)
            _one_layer(*one)
        model.layers[layer].to("meta")
        report("comparing layers with PyTorch", layer + 1, config.num_layers)
    _load(model.norm, "norm.", checkpoint.weights)
    end = f"hidden.{config.num_layers - 1}"
    head = Probe(cut(fed, ["logits"], [end]), folder)
    ends = (model, checkpoint, head, end, outcome, observe, half)
    logits = [_head(track, *ends) for track in tracks]
    for i, step in enumerate(tracks[0].steps):
        track, after = tracks[0], tracks[0].shared[i].state
        updated = [after[spec.name] for spec in state_specs(config)]
        seen(Reference(step, [], logits[0][i], track.hidden[i], [], updated))
    return outcome


def _prompt_track(schedule: Schedule) -> Track:
    return Track(schedule, list(schedule.prefill), random_state=False)


def _long_track(config: ModelConfig) -> list[Track]:
    """Steps of 4, 1 and 1 tokens behind a context twice as long as what is attended.

    None where the model's context has no room for a page and these: then nothing is left out.
    """
    budgets = [
        config.attended_tokens(i, config.max_context)
        for i, kind in enumerate(config.layer_types)
        if kind != "full"
    ]
    long = min(2 * max(budgets, default=SHORT), LONG, config.max_context - AFTER)
    past = long // config.page_size * config.page_size
    if past <= 0:
        return []
    short = plan(config, [], decode=AFTER, longest=past)
    steps, ids = [], np.array([short.prompts[0][:AFTER]], np.int32)
    for begin, count in ((0, 4), (4, 1), (5, 1)):
        at = np.array([past + begin], np.int32)
        steps.append(Step(ids[:, begin : begin + count], at, np.array([count], np.int32)))
    one = dataclasses.replace(
        short, page_table=short.page_table[:1], prefill=tuple(steps), decode=0
    )
    return [Track(one, steps, random_state=True)]


def _begin(track: Track, model: Model, weights: Mapping[str, Tensor]) -> None:
    """Embed the tokens of every step; make what its layers share, as `Model.forward_layers`."""
    table = torch.from_numpy(track.schedule.page_table)
    for step in track.steps:
        ids, past, new = map(torch.from_numpy, (step.input_ids, step.past_len, step.new_len))
        x = weights["embed.weight"][ids.long()].float()
        position = past[:, None] + torch.arange(ids.shape[1], dtype=torch.int32)
        cos, sin = model.rotation(position)
        track.x.append(x)
        track.shared.append(
            Shared(table, past, new, position, cos, sin, {}, x.new_zeros(1), x.new_zeros(1))
        )
        track.hidden.append([])
    release(weights["embed.weight"])


def _load(
    module: nn.Module,
    prefix: str,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Give a module on the meta device its weights in a dtype."""
    loaded = {}
    for name, _ in module.named_parameters():
        loaded[name] = weights[prefix + name].to(dtype)
        if loaded[name] is not weights[prefix + name]:
            release(weights[prefix + name])
    module.load_state_dict(loaded, assign=True)
    module.requires_grad_(False).eval()


def _layer_probe(
    graph: onnx.ModelProto, folder: Path, config: ModelConfig, layer: int, names: dict[int, str]
) -> Probe:
    """A session over one layer: from the hidden state before it, and what other layers gave."""
    own = [f"{spec.name}_out" for spec in _own_state(config, layer)]
    outputs = [f"hidden.{layer}", *own, *([names[layer]] if layer in names else [])]
    stop = {f"hidden.{layer - 1}", *(f"{spec.name}_out" for spec in state_specs(config))}
    return Probe(cut(graph, outputs, stop - set(own)), folder)


def _own_state(config: ModelConfig, layer: int) -> list[StateSpec]:
    return [spec for spec in state_specs(config) if spec.name.endswith(f".{layer}")]


def _one_layer(
    track: Track,
    module: nn.Module,
    layer: int,
    config: ModelConfig,
    probe: Probe,
    names: dict[int, str],
    outcome: Outcome,
    observe: Observe,
    half: HalfLayers | None,
) -> None:
    """All steps of a track through one layer, on both sides."""
    own = _own_state(config, layer)
    state = _first_state(track, config, layer)
    for i, step in enumerate(track.steps):
        shared = track.shared[i]
        shared.state.update(state)
        values = {
            **step_inputs(track.schedule, step),
            **{name: x.numpy() for name, x in state.items()},
            **{f"{name}_out": x.numpy() for name, x in shared.state.items()},
            f"hidden.{layer - 1}": track.x[i].numpy(),
        }
        before, given = in_half(shared) if half is not None else None, track.x[i]
        with Recorder() as recorder:
            track.x[i] = module(given, shared)
        state = {spec.name: shared.state[spec.name] for spec in own}
        chosen = {names[n]: x.numpy() for n, x in shared.selected.items() if n in names}
        got = probe.run({**values, **{FED + name: x for name, x in chosen.items()}})
        rounded = measure_state(outcome, own, state, got)
        if recorder.selected:
            outcome.add_selection(got[names[layer]], recorder.selected[0])
        theirs = track.x[i].numpy()
        real = np.arange(theirs.shape[1]) < step.new_len[:, None]
        name = f"hidden.{layer}"
        outcome.add_layer(relative_difference(got[name][real], theirs[real]), rounded)
        observe({name: got[name][real]}, {name: theirs[real]})
        if half is not None and before is not None:
            half.add(f"layers.{layer}.", given, before, recorder.selected, theirs, real)
        if not track.random_state:
            track.hidden[i].append(theirs)
    outs = {f"{name}_out": x.numpy() for name, x in state.items()}
    observe({name: got[name] for name in outs}, outs)


def _first_state(track: Track, config: ModelConfig, layer: int) -> dict[str, Tensor]:
    """The layer's state before the first step: zeros, or random numbers in all pages but page 0."""
    batch = len(track.schedule.page_table)
    zeros = dict(zip([s.name for s in state_specs(config)], new_state(config, batch, 1)))
    source = torch.Generator().manual_seed(layer)
    state = {}
    for spec in _own_state(config, layer):
        sizes = {"batch": batch, "pages": track.schedule.pages}
        shape = [sizes[n] if isinstance(n, str) else n for n in spec.shape]
        tensor = torch.zeros(shape, dtype=zeros[spec.name].dtype)
        if track.random_state and "pages" in spec.shape:
            pages = tensor.movedim(spec.shape.index("pages"), 0)[1:]
            if tensor.dtype == torch.int8:
                pages.random_(-127, 128, generator=source)
            elif spec.dtype == "float32":
                pages.uniform_(0.005, 0.02, generator=source)
            else:
                pages.normal_(generator=source)
        state[spec.name] = tensor
    return state


def _head(
    track: Track,
    model: Model,
    checkpoint: Checkpoint,
    probe: Probe,
    end: str,
    outcome: Outcome,
    observe: Observe,
    half: HalfLayers | None,
) -> list[np.ndarray]:
    """Logits of every step: PyTorch's, a part of the vocabulary at a time."""
    tied = checkpoint.config.tie_embeddings
    weight = checkpoint.weights["embed.weight" if tied else "lm_head.weight"]
    results = []
    for i, step in enumerate(track.steps):
        rows = torch.from_numpy(step.logit_rows).long()[..., None]
        picked = track.x[i].gather(1, rows.expand(-1, -1, track.x[i].shape[2]))
        normed = model.norm(picked)
        logits = torch.cat([normed @ part.float().T for part in weight.split(LOGIT_BLOCK)], -1)
        inputs = step_inputs(track.schedule, step)
        got = probe.run({**inputs, end: track.x[i].numpy()})["logits"]
        theirs = logits.numpy()
        outcome.add_logits(got[step.real], theirs[step.real])
        observe({"logits": got[step.real]}, {"logits": theirs[step.real]})
        results.append(theirs)
        if half is not None:
            real = step.real
            half.add_head(model.norm, picked[real], weight.split(LOGIT_BLOCK), theirs[real])
    release(weight)
    return results
