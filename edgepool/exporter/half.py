"""Does the model hold in float16? Judged in PyTorch, because ONNX Runtime's CPU does not show it.

There, ONNX Runtime computes float16 nodes in float32: nothing overflows and nothing is rounded but
weights and state. PyTorch computes in float16, with sums in float32, as GPUs do. The steps and the
selections are the reference's. A value beyond float16 is named by the layer that meets it; logits
(of the whole model), or every layer's output (of a model that is judged one layer at a time), have
limits as in `parity.py`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoint import Checkpoint
from ..config import state_specs
from ..errors import GateFailed
from ..model import Model, new_state
from ..model.rope import Rotation
from ..model.step import Step as Shared
from .parity import Outcome, Recorder, Reference, measure, relative_difference
from .schedule import Schedule

LARGEST = torch.finfo(torch.float16).max


class HalfModel:
    """A whole model in float16 that follows the reference's steps with a state of its own."""

    def __init__(self, checkpoint: Checkpoint, schedule: Schedule):
        batch = len(schedule.prompts)
        self.outcome = Outcome.of("fp16", fed=True)
        self._model = Model.from_checkpoint(checkpoint, torch.float16)
        self._table = torch.from_numpy(schedule.page_table)
        self._state = new_state(checkpoint.config, batch, schedule.pages, torch.float16)
        self._specs = state_specs(checkpoint.config)

    @torch.no_grad()
    def add(self, reference: Reference) -> None:
        """Run the reference's next step and compare; raises GateFailed for what overflows."""
        step = reference.step
        ids, past, new, rows = map(
            torch.from_numpy, (step.input_ids, step.past_len, step.new_len, step.logit_rows)
        )
        real = np.arange(step.input_ids.shape[1]) < step.new_len[:, None]
        with finite(self._model, "", real), Recorder(given=reference.selected) as recorder:
            logits, *self._state = self._model(ids, self._table, past, new, rows, *self._state)
        got = {f"{s.name}_out": x.numpy() for s, x in zip(self._specs, self._state, strict=True)}
        names = [f"selected.{i}" for i in range(len(recorder.selected))]
        got.update(zip(names, recorder.selected), logits=logits.numpy())
        measure(self.outcome, reference, got, names, self._specs)


class HalfLayers:
    """Layers in float16, each on the reference's inputs; for `by_layer.compare`."""

    def __init__(self) -> None:
        self.outcome = Outcome.of("fp16", fed=True, by_layer=True)
        self.layer: nn.Module = nn.Identity()  # the caller sets one after another

    def add(
        self,
        name: str,
        x: Tensor,
        shared: Shared,
        selected: Sequence[np.ndarray],
        expected: np.ndarray,
        real: np.ndarray,
    ) -> None:
        """Run one step through the layer and compare [B,S,hidden] where real [B,S] is true.

        x and shared (see `in_half`) are what the reference's layer was given, selected is what it
        chose.
        """
        with finite(self.layer, name, real), Recorder(given=selected) as recorder:
            got = self.layer(x.half(), shared)
        for mine, theirs in zip(recorder.selected, selected, strict=True):
            self.outcome.add_selection(mine, theirs)
        worst = relative_difference(got.float().numpy()[real], expected[real])
        rounded = any(state.dtype == torch.int8 for state in shared.state.values())
        self.outcome.add_layer(worst, rounded)

    def add_head(
        self, norm: nn.Module, x: Tensor, parts: Sequence[Tensor], expected: np.ndarray
    ) -> None:
        """Compare the logits [N,R,vocab] of hidden states [N,R,hidden]; parts of the LM head."""
        norm = copy.deepcopy(norm).half()
        with finite(norm, "norm", np.ones(x.shape[:2], bool)):
            normed = norm(x.half())
        logits = torch.cat([normed @ part.half().T for part in parts], -1)
        self.outcome.add_logits(logits.float().numpy(), expected)


def in_half(shared: Shared) -> Shared:
    """A copy of what layers share, with all of the graph's float type in float16."""
    return dataclasses.replace(
        shared,
        cos=shared.cos.half(),
        sin=shared.sin.half(),
        unused=shared.unused.half(),
        state={
            name: x.half() if x.dtype == torch.float32 and "_scale." not in name else x
            for name, x in shared.state.items()
        },
        selected=dict(shared.selected),
    )


def require(outcome: Outcome) -> None:
    """Raise GateFailed unless everything was as it has to be."""
    fault = outcome.fault()
    if fault is not None:
        raise GateFailed(f"in float16, {fault}: export with --dtype fp32")


@contextlib.contextmanager
def finite(module: nn.Module, name: str, real: np.ndarray) -> Iterator[None]:
    """Raise GateFailed for the first module inside whose input or output is not finite.

    real: bool [B,S], the rows that count.
    """
    rows = torch.from_numpy(real)

    def check(where: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            for what, tensor in (("input", inputs[0]), ("output", output)):
                values = tensor[rows] if tensor.shape[:2] == rows.shape else tensor
                if not values.isfinite().all():
                    raise GateFailed(
                        f"{where}: its {what} is beyond float16 (at most {LARGEST:.0f}): "
                        "export with --dtype fp32"
                    )

        return hook

    leaves = [(n, part) for n, part in module.named_modules() if not list(part.children())]
    inner = [(n, part) for n, part in leaves if not isinstance(part, Rotation)]  # float32
    hooks = [part.register_forward_hook(check(name + n)) for n, part in inner]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
