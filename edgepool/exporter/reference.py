"""reference.json: what PyTorch computed, for every later gate to compare with, on the board too.

    {"dtype": "float32", "prompts": [{
        "ids": [...],                    the prompt
        "greedy": [...],                 the tokens that follow it, each of the highest logit
        "top": [[[id, logit], ...], ...] the highest logits after the prompt and each greedy token
        "layers": [{"hidden": {"rms": x, "sample": [...]}, "k": {...} or null}, ...]}]}

`layers` looks at the last token of the prompt: `hidden` is the layer's output, `k` its key in
k_pool (dequantised, all heads in one vector; null for a layer that reads a donor's pages). `sample`
holds the values at `sample_positions(size)`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ..config import ModelConfig, state_specs
from .parity import Reference
from .schedule import Schedule

TOP = 5
SAMPLES = 4


def sample_positions(size: int) -> list[int]:
    """Where a vector of `size` values is sampled: evenly, from the first."""
    return [i * size // SAMPLES for i in range(SAMPLES)]


class ReferenceLog:
    """Collects reference.json from the steps of `parity.reference_steps`."""

    def __init__(self, config: ModelConfig, schedule: Schedule):
        self._config = config
        self._table = schedule.page_table
        self.prompts: list[dict[str, Any]] = [
            {"ids": list(ids), "greedy": [], "top": [], "layers": []} for ids in schedule.prompts
        ]

    def add(self, reference: Reference) -> None:
        """Take what the step says about sequences whose prompt it ends, or that it continues."""
        step = reference.step
        for b, prompt in enumerate(self.prompts):
            end = int(step.past_len[b] + step.new_len[b])
            if not step.new_len[b] or end < len(prompt["ids"]):
                continue
            if end == len(prompt["ids"]):
                prompt["layers"] = self._layers(reference, b, int(step.new_len[b]) - 1, end - 1)
            else:
                prompt["greedy"].append(int(step.input_ids[b, 0]))
            logits = reference.logits[b, 0]
            best = np.argsort(-logits, kind="stable")[:TOP]
            prompt["top"].append([[int(i), _number(logits[i])] for i in best])

    def to_dict(self) -> dict[str, Any]:
        return {"dtype": "float32", "prompts": self.prompts}

    def _layers(self, reference: Reference, b: int, row: int, position: int) -> list[Any]:
        names = [spec.name for spec in state_specs(self._config)]
        state = dict(zip(names, reference.updated))
        page = int(self._table[b, position // self._config.page_size])
        slot = position % self._config.page_size
        layers = []
        for i, hidden in enumerate(reference.hidden):
            key = None
            if f"k_pool.{i}" in state:
                stored = state[f"k_pool.{i}"][page, :, slot].float()
                scale = state.get(f"k_scale.{i}")
                key = _digest(stored if scale is None else stored * scale[page, :, slot, None])
            layers.append({"hidden": _digest(hidden[b, row]), "k": key})
        return layers


def _digest(values: np.ndarray | Tensor) -> dict[str, Any]:
    flat = np.asarray(values, np.float32).reshape(-1)
    rms = float(np.sqrt(np.mean(np.square(flat, dtype=np.float64))))
    return {"rms": _number(rms), "sample": [_number(flat[i]) for i in sample_positions(len(flat))]}


def _number(value: float) -> float:
    """Six digits: what FP32 arithmetic in another order agrees on, roughly."""
    return float(f"{value:.6g}")
