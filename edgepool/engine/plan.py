"""`edgepool plan`: what a model will take and give on a target, before anything is built."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Callable, Dict, List

from ..config import ModelConfig
from ..errors import BadInput
from ..targets import Target
from .footprint import Memory, Precision, memory, precisions_of, state_elements
from .memory import GIB, RESERVE
from .roofline import Key, Speed, speeds

GPU_RESERVE = GIB // 2  # of a GPU with memory of its own: CUDA context and kernels
MOST_BATCH = 4096


@dataclass(frozen=True)
class Fit:
    """Of one size of memory: whether the model runs and builds in it, and up to which context."""

    gib: int
    runs: bool
    builds: bool
    largest_context: int


@dataclass(frozen=True)
class Plan:
    """Per precision the memory and fits; speeds by (power mode, attention, precision)."""

    target: str
    context: int
    batch: int
    memory: Dict[str, Memory]
    fits: Dict[str, List[Fit]]
    speeds: Dict[Key, Speed]

    @property
    def copied_per_step(self) -> Dict[str, int]:
        """Bytes of state that every step copies because it is not updated in place."""
        return {name: need.copies for name, need in self.memory.items()}

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON types."""
        memory = {
            name: {
                **dataclasses.asdict(m),
                "state": m.state,
                "total": m.total,
                "build_peak": m.build_peak,
            }
            for name, m in self.memory.items()
        }
        estimates = [
            {"mode": mode, "attention": attention, "precision": precision, **vars(speed)}
            for (mode, attention, precision), speed in self.speeds.items()
        ]
        return {
            "target": self.target,
            "context": self.context,
            "batch": self.batch,
            "memory": memory,
            "fits": {name: [dict(vars(f)) for f in fits] for name, fits in self.fits.items()},
            "copied_per_step": self.copied_per_step,
            "speed_estimates": estimates,
        }


def plan(config: ModelConfig, target: Target, context: int, batch: int = 1) -> Plan:
    """Plan `batch` sequences of `context` tokens; raises BadInput for what the model cannot do."""
    check_sizes(config, context, batch)
    precisions = precisions_of(target)
    return Plan(
        target=target.name,
        context=context,
        batch=batch,
        memory={p.name: memory(config, target, p, context, batch) for p in precisions},
        fits={
            p.name: [fit(config, target, p, context, batch, gib) for gib in target.memory_gib]
            for p in precisions
        },
        speeds=speeds(config, target, context, batch),
    )


def check_sizes(config: ModelConfig, context: int, batch: int) -> None:
    """Raise BadInput for a context that the model does not have, and for a batch beyond reason."""
    if not 1 <= context <= config.max_context:
        raise BadInput(
            "--context %d: choose 1 to %d for this model" % (context, config.max_context)
        )
    if not 1 <= batch <= MOST_BATCH:
        raise BadInput("--batch %d: choose 1 to %d" % (batch, MOST_BATCH))


def fit(
    config: ModelConfig, target: Target, precision: Precision, context: int, batch: int, gib: int
) -> Fit:
    """Whether the plan fits in `gib` GiB, less what is left to others."""
    usable = gib * GIB - (RESERVE if target.shared_memory else GPU_RESERVE)
    most = target.tensor_elements

    def runs(tokens: int) -> bool:
        fits = memory(config, target, precision, tokens, batch).total <= usable
        return fits and (most is None or state_elements(config, batch, tokens) <= most)

    # A GPU with memory of its own builds in the host's.
    peak = memory(config, target, precision, context, batch).build_peak
    builds = runs(context) and (peak <= usable or not target.shared_memory)
    return Fit(gib, runs(context), builds, largest(runs, config.max_context))


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in [0, most] that fits, when every smaller one does too; 0 always fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
