"""SmoothQuant: moves outliers of activations into weights (Xiao et al. 2022, arXiv:2211.10438).

A channel j of a linear's input is divided by s[j] = a[j]^alpha / w[j]^(1 - alpha), a its largest
|value| and w the largest |weight| that reads it, and the weights that read it are multiplied. The
division costs nothing where what gives the channel is linear in a weight of its own: RMSNorm's, the
rows of v_proj for o_proj's input, or those of up_proj for down_proj's. An LM head that shares the
embedding's table is left alone. After `rotation` only down_proj's input, SwiGLU's product, has
outliers of size.

Unless alpha is given, each input gets the best of several: of ALPHAS, and of s[j] = max(a[j], c),
which leaves the channels below c to each other; c is the a of a channel in the middle, or nearer to
the outliers (CAPS). The best makes the least error in the output: with step d, a rounded value is
off by d^2/12 in the mean square, and `rounding` leaves FEEDBACK of the weights' part, so that is

    d_x^2/12 * sum_oj (w[o,j] s[j])^2  +  FEEDBACK * sum_o d_w[o]^2/12 * sum_j mean(x[j]^2) / s[j]^2

Where an input goes in as two halves (see `qdq`), d_x is HALF times smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..config import ModelConfig
from . import blocks
from .linears import HEAD, Group, Linear

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
CAPS = (0, 1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the channels are above c
HALF = 254  # a rounding error is at most half a step: times this, it fills the range
HALVED = "down_proj"  # SwiGLU's product, whose outliers no scale suits, goes in as two halves
FEEDBACK = 0.5  # of the weights' error is left, measured on SmolLM2
HEAD_ROWS = 8192  # of the vocabulary that are looked at to choose alpha
SMALLEST = 1e-5  # of a range: a channel that is always zero

Read = Callable[[str], np.ndarray]
Vectors = dict[str, np.ndarray]


@dataclass
class Smoothing:
    """Vectors by name, float32; a name that is missing is not scaled.

    inputs   linear's name: its weight is multiplied per input channel
    outputs  weight's or bias's name: it is divided per output channel (RMSNorm weights too)
    groups   group's name: what its activation is divided by
    """

    inputs: Vectors = field(default_factory=dict)
    outputs: Vectors = field(default_factory=dict)
    groups: Vectors = field(default_factory=dict)

    def factors(self, linear: Linear, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """What the rows and the columns of the weight, as the graph has it, are multiplied by."""
        outputs, inputs = shape if linear.turned else shape[::-1]
        scale = self.inputs.get(linear.name, np.ones(inputs, np.float32))
        divisor = self.outputs.get(linear.weight)
        shrink = np.ones(outputs, np.float32) if divisor is None else 1 / divisor
        return (shrink, scale) if linear.turned else (scale, shrink)

    def vector(self, name: str, array: np.ndarray) -> np.ndarray:
        """A norm's weight or a bias after smoothing: float32."""
        array = np.asarray(array, np.float32)
        divisor = self.outputs.get(name)
        return array if divisor is None else array / divisor


@dataclass(frozen=True)
class Activations:
    """What calibration knows of the inputs, by group: largest |value|, mean square, each [C]."""

    channels: Mapping[str, np.ndarray]
    mean_squares: Mapping[str, np.ndarray]


def smoothing(
    config: ModelConfig,
    groups: Sequence[Group],
    activations: Activations,
    read: Read,
    alpha: float | None = None,
) -> Smoothing:
    """Scales for every group whose input a weight can absorb. read gives a weight by its name."""
    maker = _Maker(activations, read, alpha)
    result, found = maker.result, {group.name: group for group in groups}
    for i in range(config.num_layers):
        for first, norm in (("q_proj", "attn_norm"), ("gate_proj", "mlp_norm")):
            scale = maker.scale([found[f"layers.{i}.{first}"]])
            result.outputs[f"layers.{i}.{norm}.weight"] = scale
        scale = maker.scale([found[f"layers.{i}.{HALVED}"]])
        result.outputs[f"layers.{i}.up_proj.weight"] = scale
    heads = (config.num_kv_heads, config.group_size, config.head_dim)

    def shared(channels: np.ndarray) -> np.ndarray:
        """Query heads of a KV head read the same channels of V: the largest of them for all."""
        largest = channels.reshape(heads).max(1, keepdims=True)
        return np.broadcast_to(largest, heads).reshape(-1)

    for donor in filter(config.is_donor, range(config.num_layers)):
        readers = [i for i in range(config.num_layers) if config.kv_donor[i] == donor]
        # Attention mixes tokens, never channels, so o_proj's input is linear in V's channels.
        spread = maker.scale([found[f"layers.{i}.o_proj"] for i in readers], shared)
        for kind in ("weight", "bias"):
            result.outputs[f"layers.{donor}.v_proj.{kind}"] = spread.reshape(heads)[:, 0].reshape(
                -1
            )
    if not config.tie_embeddings:
        result.outputs["norm.weight"] = maker.scale([found[HEAD]])
    return result


class _Maker:
    """Chooses the scales of groups one after the other, and keeps them in `result`."""

    def __init__(self, activations: Activations, read: Read, alpha: float | None):
        self.result = Smoothing()
        self._activations = activations
        self._read = read
        self._alpha = alpha

    def scale(
        self,
        groups: Sequence[Group],
        shared: Callable[[np.ndarray], np.ndarray] = lambda channels: channels,
    ) -> np.ndarray:
        """One scale for all these groups: [C]. `shared` ties channels to each other."""
        largest = np.max([self._activations.channels[group.name] for group in groups], axis=0)
        matrices = [(group, *self._matrix(linear)) for group in groups for linear in group.linears]
        readers = [
            blocks.largest(matrix, rows, columns, axis=0 if turned else 1)
            for _, matrix, rows, columns, turned in matrices
        ]
        a, w = shared(largest), shared(np.max(readers, axis=0))
        tried = _scales(a, w) if self._alpha is None else [_scale(a, w, self._alpha)]
        if len(tried) > 1:
            errors = [sum(self._error(scale, *entry) for entry in matrices) for scale in tried]
            tried = [tried[int(np.argmin(errors))]]
        for group in groups:
            self.result.groups[group.name] = tried[0]
            for linear in group.linears:
                self.result.inputs[linear.name] = tried[0]
        return tried[0]

    def _matrix(self, linear: Linear) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        """A weight (a part of a large vocabulary's), its factors so far, whether it is turned."""
        matrix = self._read(linear.weight)
        if linear.turned:
            matrix = matrix[:: max(1, len(matrix) // HEAD_ROWS)]
        return matrix, *self.result.factors(linear, matrix.shape), linear.turned

    def _error(
        self,
        scale: np.ndarray,
        group: Group,
        matrix: np.ndarray,
        rows: np.ndarray,
        columns: np.ndarray,
        turned: bool,
    ) -> float:
        """The expected squared error of a linear's output, times 12 * 127^2."""
        if turned:
            columns = columns * scale
        else:
            rows = rows * scale
        step = float((self._activations.channels[group.name] / scale).max())
        step = step / HALF if group.name.endswith(HALVED) else step
        steps = blocks.largest(matrix, rows, columns, axis=1 if turned else 0)
        squares = float((self._activations.mean_squares[group.name] / scale**2).sum())
        weights = FEEDBACK * float((steps**2).sum()) * squares
        return step**2 * blocks.energy(matrix, rows, columns) + weights


def _scales(activations: np.ndarray, weights: np.ndarray) -> list[np.ndarray]:
    """All that are tried, from the largest |value| and |weight| of each channel."""
    ranked = np.sort(np.maximum(activations, SMALLEST))[::-1]
    capped = [np.maximum(activations, ranked[int(len(ranked) * share)]) for share in CAPS]
    return [*(_scale(activations, weights, alpha) for alpha in ALPHAS), *capped]


def _scale(activations: np.ndarray, weights: np.ndarray, alpha: float) -> np.ndarray:
    a = np.maximum(activations.astype(np.float64), SMALLEST)
    w = np.maximum(weights.astype(np.float64), SMALLEST)
    return (a**alpha / w ** (1 - alpha)).astype(np.float32)
