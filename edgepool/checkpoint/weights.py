"""What a weight may be (shape, float type, finite), and weights that are read when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Union

import torch
from torch import Tensor

from ..errors import BadInput

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that `read` fetches, so that a checkpoint larger than memory can be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


Weight = Union[Tensor, LazyTensor]


def check_names(where: object, wanted: Iterable[str], found: Iterable[str]) -> None:
    """Raise BadInput unless both name the same tensors."""
    wanted, found = set(wanted), set(found)
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing:
        raise BadInput(f"{where}: tensor {_listed(missing)} is missing")
    if extra:
        raise BadInput(f"{where}: tensor {_listed(extra)} belongs to no layer of the configuration")


def check_shape(where: object, name: str, shape: Iterable[int], wanted: Iterable[int]) -> None:
    shape, wanted = list(shape), list(wanted)
    if shape != wanted:
        raise BadInput(
            f"{where}: tensor '{name}' has shape {shape}, the configuration implies {wanted}"
        )


def check_weights(
    where: object, weights: Mapping[str, Weight], shapes: Mapping[str, tuple]
) -> None:
    """Raise BadInput unless names, shapes and dtypes are those of the configuration."""
    check_names(where, shapes, weights)
    for name, shape in shapes.items():
        weight = weights[name]
        check_shape(where, name, weight.shape, shape)
        if weight.dtype not in DTYPES:
            kind = str(weight.dtype).replace("torch.", "")
            allowed = ", ".join(DTYPES.values())
            raise BadInput(f"{where}: tensor '{name}' is {kind}; expected one of {allowed}")


def check_finite(where: object, name: str, tensor: Tensor) -> None:
    """Raise BadInput for NaN or Inf. One pass, no temporary: both reach the extremes."""
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise BadInput(f"{where}: tensor '{name}' holds NaN or Inf")


def _listed(names: list[str]) -> str:
    rest = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"'{names[0]}'{rest}"
