"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split order, with scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..config import ModelConfig, RopeScaling


class Rotation(nn.Module):
    """cos and sin of a model's positions [B,S] int32, see `rotation`.

    A module, so that its nodes have names of their own: angles are float32 in every graph, because
    float16 has no odd positions beyond 2,048 and rounds an angle of 1,000 to halves.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        frequencies, self.factor = inverse_frequencies(config)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return rotation(position, self.frequencies, self.factor)


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Angle per position of each dimension pair, and the factor on cos and sin.

    Returns ([D/2] float32, attention factor); the factor is 1 except for `yarn`.
    """
    dim = config.head_dim
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    frequencies = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, scaling, config.rope_theta)


def _llama3(frequencies: Tensor, s: RopeScaling) -> Tensor:
    """Llama 3.1: divide long wavelengths by `factor`, keep short ones, blend between the two."""
    turns = s.original_max_context * frequencies / (2 * math.pi)
    blend = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * blend + frequencies / s.factor * (1 - blend)


def _yarn(frequencies: Tensor, s: RopeScaling, theta: float) -> tuple[Tensor, float]:
    """YaRN: interpolate dimensions that turn less than `beta_slow` times in the trained context."""
    dim = 2 * len(frequencies)

    def dimension_of(turns: float) -> float:
        return (
            dim * math.log(s.original_max_context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )

    low, high = dimension_of(s.beta_fast), dimension_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, device="cpu") - low) / (high - low)).clamp(0, 1)
    scaled = frequencies / s.factor * ramp + frequencies * (1 - ramp)
    factor = s.attention_factor
    if factor is None:
        factor = 0.1 * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0
    return scaled, factor


def rotation(position: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin for positions [B,S] int32: two [B,S,1,D] float32 tensors.

    The sine's first half is negated, so that `rotate` needs no negation of its input.
    """
    angle = position[..., None, None].float() * frequencies
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn [B,S,H,D] by its positions: pairs are (i, i + D/2)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([second, first], -1) * sin
