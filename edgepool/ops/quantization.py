"""INT8 storage of keys, values and pooled keys: one FP32 scale for each vector.

scale = amax / 127 and code = round(x / scale), both IEEE divisions, rounded half to even, within
[-127, 127]. A zero vector has scale 0 and codes 0. A vector that holds a NaN or an infinity has
that NaN or infinity as its scale and codes 0, so it reads back as NaN and is never hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .paging import compute_dtype


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., D] and scales float32 [...] of vectors x [..., D] (any float type)."""
    x = x.float()
    scale = x.abs().amax(-1) / 127
    codes = (x / scale[..., None]).round().clamp(-127, 127)
    codes = codes.masked_fill(scale[..., None] == 0, 0)  # amax / 127 may underflow
    return codes.nan_to_num(nan=0.0).to(torch.int8), scale


def dequantize(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors [..., D] in `dtype` of what is stored; scale [...] is used for int8 only."""
    if stored.dtype == torch.int8:
        return stored.to(dtype) * scale[..., None].to(dtype)
    return stored.to(dtype)


def computed(storage: torch.dtype, activation: torch.dtype) -> torch.dtype:
    """The type to compute in over a pool of type `storage` and activations of type `activation`."""
    return compute_dtype(activation if storage == torch.int8 else storage)
