"""SmoothQuant: moves outliers of activations into weights (Xiao et al. 2022, arXiv:2211.10438).

A channel j of a linear's input is divided by s[j] = a[j]^alpha / w[j]^(1 - alpha), a its largest
|value| and w the largest |weight| that reads it, and the weights that read it are multiplied. The
division costs nothing where what gives the channel is linear in a weight of its own: RMSNorm's, the
rows of v_proj for o_proj's input, those of up_proj for down_proj's. Where the LM head shares the
embedding's table, the embedding's output is multiplied by 1/s (one Mul).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..config import ModelConfig
from .linears import HEAD, Group, Linear

ALPHA = 0.7
SMALLEST = 1e-5  # of a range: a channel that is always zero

Read = Callable[[str], np.ndarray]
Vectors = dict[str, np.ndarray]


@dataclass
class Smoothing:
    """Vectors by name, float32; a name that is missing is not scaled.

    inputs   linear's name: its weight is multiplied per input channel
    outputs  weight's or bias's name: it is divided per output channel (RMSNorm weights too)
    groups   group's name: what its activation is divided by
    embedding  what the embedding's output is divided by, or None
    """

    inputs: Vectors = field(default_factory=dict)
    outputs: Vectors = field(default_factory=dict)
    groups: Vectors = field(default_factory=dict)
    embedding: np.ndarray | None = None

    def weight(self, linear: Linear, array: np.ndarray) -> np.ndarray:
        """The linear's weight, as the graph has it, after smoothing: float32."""
        array = np.asarray(array, np.float32)
        scale, divisor = self.inputs.get(linear.name), self.outputs.get(linear.weight)
        if scale is not None:
            array = array * (scale[None, :] if linear.turned else scale[:, None])
        if divisor is not None:
            array = array / (divisor[:, None] if linear.turned else divisor[None, :])
        return array

    def vector(self, name: str, array: np.ndarray) -> np.ndarray:
        """A norm's weight or a bias after smoothing: float32."""
        array = np.asarray(array, np.float32)
        divisor = self.outputs.get(name)
        return array if divisor is None else array / divisor


def smoothing(
    config: ModelConfig,
    groups: Sequence[Group],
    channels: Mapping[str, np.ndarray],
    read: Read,
    alpha: float = ALPHA,
) -> Smoothing:
    """Scales for every group whose input a weight can absorb.

    channels: by group, the largest |value| of each channel [C]; read: a weight by its name.
    """
    result = Smoothing()
    found = {group.name: group for group in groups}

    def largest(group: Group) -> np.ndarray:
        parts = [
            np.abs(result.weight(linear, read(linear.weight))).max(0 if linear.turned else 1)
            for linear in group.linears
        ]
        return np.max(parts, axis=0)

    def put(group: Group, scale: np.ndarray) -> None:
        result.groups[group.name] = scale
        for linear in group.linears:
            result.inputs[linear.name] = scale

    for i in range(config.num_layers):
        for first, norm in (("q_proj", "attn_norm"), ("gate_proj", "mlp_norm")):
            group = found[f"layers.{i}.{first}"]
            scale = _scale(channels[group.name], largest(group), alpha)
            put(group, scale)
            result.outputs[f"layers.{i}.{norm}.weight"] = scale
    for donor in filter(config.is_donor, range(config.num_layers)):
        _values(config, donor, found, channels, largest, put, result, alpha)
    group = found[HEAD]
    scale = _scale(channels[HEAD], largest(group), alpha)
    put(group, scale)
    result.outputs["norm.weight"] = scale
    if config.tie_embeddings:
        result.embedding = scale
    return result


def _values(
    config: ModelConfig,
    donor: int,
    found: Mapping[str, Group],
    channels: Mapping[str, np.ndarray],
    largest: Callable[[Group], np.ndarray],
    put: Callable[[Group, np.ndarray], None],
    result: Smoothing,
    alpha: float,
) -> None:
    """v_proj -> o_proj of a donor and its readers: attention mixes tokens, never channels."""
    readers = [i for i in range(config.num_layers) if config.kv_donor[i] == donor]
    groups = [found[f"layers.{i}.o_proj"] for i in readers]
    heads = (config.num_kv_heads, config.group_size, config.head_dim)

    def shared(vectors: Sequence[np.ndarray]) -> np.ndarray:
        """The largest over layers and over the query heads of a KV head: [Hkv,D]."""
        return np.max([vector.reshape(heads).max(1) for vector in vectors], axis=0)

    scale = _scale(
        shared([channels[group.name] for group in groups]),
        shared(list(map(largest, groups))),
        alpha,
    )
    spread = np.repeat(scale[:, None], config.group_size, axis=1).reshape(-1)
    for group in groups:
        put(group, spread)
    for kind in ("weight", "bias"):
        result.outputs[f"layers.{donor}.v_proj.{kind}"] = scale.reshape(-1)


def _scale(activations: np.ndarray, weights: np.ndarray, alpha: float) -> np.ndarray:
    a = np.maximum(activations.astype(np.float64), SMALLEST)
    w = np.maximum(weights.astype(np.float64), SMALLEST)
    return (a**alpha / w ** (1 - alpha)).astype(np.float32)
