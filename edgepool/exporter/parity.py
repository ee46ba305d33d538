"""Is the exported file PyTorch's model? Both run the same steps, every difference is measured.

Where rounding turns a near-tie of the selection, the two go different ways and the export is not to
blame. Such flips are counted and must stay rare; parity of the logits is then taken again with the
reference's selection and state fed in.

INT8 pages need more: one value that is rounded the other way in the first layer changes a tenth of
what later layers store. They are judged one layer at a time (`by_layer.py`), and how far the whole
model drifts is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..config import ModelConfig, StateSpec, state_specs
from ..errors import GateFailed
from ..model import Model, new_state
from ..progress import Report, silent
from .probe import FED, Probe, feed, hidden_states, selections, watch
from .schedule import Schedule, Step, decode_step

TOLERANCES = {"fp32": 1e-3, "fp16": 0.25}
LAYER_TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2}  # `relative_difference` of a layer's output
ROUNDED_TOLERANCE = 5e-2  # of a layer's output where it rounded an INT8 value the other way
MOST_FLIPS = {"fp32": 1e-3, "fp16": 1e-2}  # of all selected blocks, of all stored INT8 values

Arrays = dict[str, np.ndarray]
Observe = Callable[[Arrays, Arrays], None]  # (ONNX Runtime's, PyTorch's): values of real rows


@dataclass
class Outcome:
    """What was measured; the manifest records it.

    fed: the reference's selection and state were fed in. by_layer: every layer was given the
    reference's inputs, and the `relative_difference` of its output taken (`by_layer.py`); apart for
    steps in which the layer rounded an INT8 value the other way. choices: queries, of a head, for
    which the index took all the blocks it may; where there are none, it left nothing out.
    """

    dtype: str
    tolerance: float
    layer_tolerance: float
    fed: bool = False
    by_layer: bool = False
    steps: int = 0
    tokens: int = 0
    max_logit_difference: float = 0.0
    max_layer_difference: float = 0.0
    max_layer_difference_rounded: float = 0.0
    max_state_difference: float = 0.0
    greedy_differences: int = 0
    selections: int = 0
    selection_flips: int = 0
    choices: int = 0
    stored: int = 0
    stored_flips: int = 0

    @classmethod
    def of(cls, dtype: str, fed: bool = False, by_layer: bool = False) -> Outcome:
        """An empty outcome with the limits of a dtype."""
        return cls(dtype, TOLERANCES[dtype], LAYER_TOLERANCES[dtype], fed, by_layer)

    def add_logits(self, mine: np.ndarray, theirs: np.ndarray) -> None:
        """Compare logits [N,ROWS,vocab]; row 0 is the one whose token a greedy decoder takes."""
        worst = largest_difference(mine, theirs)
        self.max_logit_difference = max(self.max_logit_difference, worst)
        self.greedy_differences += greedy_differences(mine[:, 0], theirs[:, 0], 2 * self.tolerance)

    def add_selection(self, mine: np.ndarray, theirs: np.ndarray) -> None:
        """Compare selected blocks [B,S,Hs,K]."""
        flips, count = selection_flips(mine, theirs)
        self.selection_flips += flips
        self.selections += count
        self.choices += int((theirs[..., -1] >= 0).sum())

    def add_layer(self, worst: float, rounded: int) -> None:
        if rounded:
            self.max_layer_difference_rounded = max(self.max_layer_difference_rounded, worst)
        else:
            self.max_layer_difference = max(self.max_layer_difference, worst)

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        return {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in record.items()}

    def fault(self) -> str | None:
        """The first thing that is not as it has to be, in words."""
        rounded, flips = max(ROUNDED_TOLERANCE, self.layer_tolerance), MOST_FLIPS[self.dtype]
        checks = {
            f"a logit differs by {self.max_logit_difference:.3g} (limit {self.tolerance:g})": (
                self.max_logit_difference <= self.tolerance
            ),
            f"a layer's output differs by {self.max_layer_difference:.3g} of its size "
            f"(limit {self.layer_tolerance:g})": self.max_layer_difference <= self.layer_tolerance,
            f"a layer's output differs by {self.max_layer_difference_rounded:.3g} of its size "
            f"where INT8 rounding does (limit {rounded:g})": (
                self.max_layer_difference_rounded <= rounded
            ),
            f"{self.greedy_differences} greedy tokens differ": self.greedy_differences == 0,
            f"{self.selection_flips} of {self.selections} selected blocks differ": (
                self.selection_flips <= flips * self.selections
            ),
            f"{self.stored_flips} of {self.stored} stored INT8 values differ": (
                self.stored_flips <= flips * self.stored
            ),
        }
        return next((what for what, passed in checks.items() if not passed), None)

    def require(self, where: str) -> None:
        """Raise GateFailed unless everything is as it has to be."""
        fault = self.fault()
        if fault is not None:
            raise GateFailed(f"{where}: not equal to PyTorch: {fault}")


# --------------------------------------------------------------------------------- reference


@dataclass
class Reference:
    """One step of the reference: the state before it and everything that came out.

    logits [B,ROWS,vocab]; hidden [B,S,hidden] float32 per layer; selected [B,S,Hs,K] per
    IndexPoolSelect; updated: the state after the step.
    """

    step: Step
    state: list[Tensor]
    logits: np.ndarray
    hidden: list[np.ndarray]
    selected: list[np.ndarray]
    updated: list[Tensor]


@dataclass(frozen=True)
class Steps:
    """A schedule, and the reference's steps along it: `run` computes them, or gives those kept."""

    config: ModelConfig
    schedule: Schedule
    run: Callable[[], Iterable[Reference]]


def steps_of(model: Model, schedule: Schedule) -> Steps:
    """The steps of PyTorch's model, computed each time."""
    return Steps(model.config, schedule, lambda: reference_steps(model, schedule))


@dataclass
class Excerpt:
    """Keeps the references of `schedule.excerpt`, to compare more graphs with them."""

    config: ModelConfig
    schedule: Schedule
    kept: list[Reference] = field(default_factory=list)
    seen: int = 0

    def add(self, reference: Reference) -> None:
        if self.seen in self.schedule.excerpt:
            self.kept.append(reference)
        self.seen += 1

    def steps(self) -> Steps:
        prefill = tuple(reference.step for reference in self.kept)
        schedule = replace(self.schedule, prefill=prefill, decode=0)
        return Steps(self.config, schedule, lambda: self.kept)


class Recorder(TorchDispatchMode):
    """Keeps what `edgepool::index_pool_select` returns, in the order of the calls.

    given: what the callers get instead, in the same order.
    """

    def __init__(self, given: Sequence[np.ndarray] | None = None) -> None:
        super().__init__()
        self.selected: list[np.ndarray] = []
        self._given = given

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.edgepool.index_pool_select.default:
            self.selected.append(result.numpy())
            if self._given is not None:
                return torch.from_numpy(self._given[len(self.selected) - 1])
        return result


@torch.no_grad()
def reference_steps(model: Model, schedule: Schedule) -> Iterator[Reference]:
    """Run the schedule with PyTorch; decode steps take the token of the highest logit."""
    batch = len(schedule.prompts)
    table = torch.from_numpy(schedule.page_table)
    state = new_state(model.config, batch, schedule.pages, model.embed.weight.dtype)
    step, number, best = schedule.prefill[0], 0, np.zeros(batch, np.int32)
    while True:
        ids, past, new, rows = map(
            torch.from_numpy, (step.input_ids, step.past_len, step.new_len, step.logit_rows)
        )
        with Recorder() as recorder:
            logits, hidden, updated = model.forward_layers(ids, table, past, new, rows, *state)
        layers = [x.float().numpy() for x in hidden]
        yield Reference(step, state, logits.numpy(), layers, recorder.selected, updated)
        state, number = updated, number + 1
        best = np.where(step.real, logits[:, 0].argmax(-1).numpy(), best)
        if number < len(schedule.prefill):
            step = schedule.prefill[number]
        elif number < schedule.steps:
            step = decode_step(best, step.past_len + step.new_len)
        else:
            return


# -------------------------------------------------------------------------------- comparison


def compare(
    graph: onnx.ModelProto,
    folder: Path,
    steps: Steps,
    dtype: str,
    report: Report = silent,
    seen: Callable[[Reference], None] = lambda reference: None,
) -> Outcome:
    """Run a graph (from `probe.read_graph`) on ONNX Runtime beside PyTorch.

    First each keeps its own state and selection; if a flip then takes the logits apart, again with
    the reference's fed in. seen is called with every step of the reference.
    """
    free = compare_once(graph, folder, steps, dtype, False, report, seen)
    if not free.selection_flips or free.max_logit_difference <= free.tolerance:
        return free
    return compare_once(graph, folder, steps, dtype, True, report)


def compare_once(
    graph: onnx.ModelProto,
    folder: Path,
    steps: Steps,
    dtype: str,
    fed: bool,
    report: Report = silent,
    seen: Callable[[Reference], None] = lambda reference: None,
    observe: Observe | None = None,
) -> Outcome:
    """One run; observe is called with each step's logits and hidden states, and the last state."""
    names = selections(graph)
    watched = onnx.ModelProto()
    watched.CopyFrom(graph)
    if fed:
        feed(watched, names)
    watch(watched, names)
    layers = hidden_states(graph) if observe else []
    watch(watched, layers)
    probe = Probe(watched, folder)
    outcome = Outcome.of(dtype, fed)
    schedule, specs = steps.schedule, state_specs(steps.config)
    state: Arrays = {}
    for reference in steps.run():
        if fed or not state:
            state = {s.name: x.numpy() for s, x in zip(specs, reference.state)}
        values = {**step_inputs(schedule, reference.step), **state}
        values.update({FED + name: x for name, x in zip(names, reference.selected)})
        got = probe.run(values)
        state = {spec.name: got[f"{spec.name}_out"] for spec in specs}
        measure(outcome, reference, got, names, specs)
        seen(reference)
        if observe:
            _show(observe, reference, got, layers, outcome.steps == schedule.steps)
        report("comparing with PyTorch", outcome.steps, schedule.steps)
    return outcome


def _show(
    observe: Observe, reference: Reference, got: Arrays, layers: list[str], last: bool
) -> None:
    step, real = reference.step, reference.step.real
    mine = {"logits": got["logits"][real]}
    theirs = {"logits": reference.logits[real]}
    rows = np.arange(step.input_ids.shape[1]) < step.new_len[:, None]
    for name, hidden in zip(layers, reference.hidden, strict=True):
        mine[name], theirs[name] = got[name][rows], hidden[rows]
    if last:
        names = [name for name in got if name.endswith("_out")]
        mine.update({name: got[name] for name in names})
        theirs.update(zip(names, (x.numpy() for x in reference.updated), strict=True))
    observe(mine, theirs)


def step_inputs(schedule: Schedule, step: Step) -> Arrays:
    """The inputs of a step that are not state."""
    return {
        "input_ids": step.input_ids,
        "page_table": schedule.page_table,
        "past_len": step.past_len,
        "new_len": step.new_len,
        "logit_rows": step.logit_rows,
    }


def measure(
    outcome: Outcome,
    reference: Reference,
    got: Mapping[str, np.ndarray],
    names: list[str],
    specs: list[StateSpec],
) -> None:
    """Add the differences of one step to the outcome."""
    outcome.steps += 1
    outcome.tokens += int(reference.step.new_len.sum())
    updated = {spec.name: x for spec, x in zip(specs, reference.updated, strict=True)}
    measure_state(outcome, specs, updated, got)
    for name, theirs in zip(names, reference.selected, strict=True):
        outcome.add_selection(got[name], theirs)
    real = reference.step.real
    outcome.add_logits(got["logits"][real], reference.logits[real])


def measure_state(
    outcome: Outcome,
    specs: list[StateSpec],
    updated: Mapping[str, Tensor],
    got: Mapping[str, np.ndarray],
) -> int:
    """Compare the state after a step; returns how many INT8 values were rounded the other way."""
    rounded = 0
    for spec in specs:
        mine, theirs = got[f"{spec.name}_out"], updated[spec.name].numpy()
        if theirs.dtype == np.int8:
            rounded += int((mine != theirs).sum())
            outcome.stored += int((theirs != 0).sum())
        else:
            worst = largest_difference(mine, theirs)
            outcome.max_state_difference = max(outcome.max_state_difference, worst)
    outcome.stored_flips += rounded
    return rounded


def largest_difference(mine: np.ndarray, theirs: np.ndarray) -> float:
    """max |mine - theirs|; infinite where one is NaN, so that it never passes for small."""
    change = np.abs(mine.astype(np.float32) - theirs.astype(np.float32))
    return float(np.nan_to_num(change, nan=np.inf).max(initial=0))


def relative_difference(mine: np.ndarray, theirs: np.ndarray) -> float:
    """max |mine - theirs| / (|theirs| + rms(theirs)): fair to small values and to outliers."""
    rms = float(np.sqrt(np.mean(np.square(theirs, dtype=np.float64)))) or 1.0
    return largest_difference(mine / (np.abs(theirs) + rms), theirs / (np.abs(theirs) + rms))


def selection_flips(mine: np.ndarray, theirs: np.ndarray) -> tuple[int, int]:
    """How many of the reference's selected blocks [B,S,Hs,K] are missing, and their number."""
    rows = (mine != theirs).any(-1)
    found = (mine[rows][..., None, :] == theirs[rows][..., :, None]).any(-1)
    return int(((theirs[rows] >= 0) & ~found).sum()), int((theirs >= 0).sum())


def greedy_differences(mine: np.ndarray, theirs: np.ndarray, tie: float) -> int:
    """Rows of logits [...,vocab] whose highest is another token, and not within `tie` of it."""
    token = mine.argmax(-1)
    behind = theirs.max(-1) - np.take_along_axis(theirs, token[..., None], -1)[..., 0]
    return int((behind > tie).sum())
