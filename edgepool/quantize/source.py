"""What every INT8 graph of a bundle is made from: rotated weights, calibration, smoothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..bundle import Bundle
from ..config import ModelConfig
from ..errors import BadInput
from . import record
from .linears import Group, groups
from .record import Calibration
from .rotation import RotatedWeights
from .smooth import HALVED, Activations, Smoothing, smoothing


@dataclass(frozen=True)
class Source:
    """config is that of the INT8 graphs: the bundle's, but for INT8 pages."""

    bundle: Bundle
    config: ModelConfig
    calibration: Calibration
    weights: RotatedWeights
    smoothing: Smoothing
    groups: tuple[Group, ...]

    def check_names(self, float_inputs: Collection[str]) -> None:
        """Raise BadInput for a name that no group has."""
        unknown = set(float_inputs) - {group.name for group in self.groups}
        if unknown:
            raise BadInput(
                f"{sorted(unknown)[0]}: no linear layer of {self.bundle.path} has this name"
            )

    def halved(self, float_inputs: Collection[str] = ()) -> tuple[str, ...]:
        """The groups whose inputs go in as two INT8 halves."""
        names = [group.name for group in self.groups if group.name.endswith(HALVED)]
        return tuple(name for name in names if name not in float_inputs)

    def int8_share(self, float_inputs: Collection[str]) -> float:
        """The part of the linears' multiply-adds, LM head included, with INT8 on both sides.

        Those of an input that goes in as two halves count once, as they do in FP32.
        """
        total = quantised = 0
        for group in self.groups:
            for linear in group.linears:
                size = int(np.prod(self.weights.stored.tensors[linear.weight].dims))
                total += size
                quantised += size * (group.name not in float_inputs)
        return quantised / total


def prepare(bundle: Bundle, alpha: float | None, kv: bool) -> Source:
    """Read the bundle's calibration and find the smoothing; kv: INT8 pages and index."""
    calibration = record.read(bundle.file(record.NAME), bundle)
    weights = RotatedWeights.of(bundle)
    config = dataclasses.replace(bundle.config, kv_dtype="int8") if kv else bundle.config
    found = groups(weights.stored.graph)
    missing = [group.name for group in found if group.name not in calibration.tensors]
    if missing:
        raise BadInput(
            f"{bundle.path / record.NAME}: no range for {', '.join(missing[:4])}: calibrate again"
        )
    channels = {name: tensor.channels for name, tensor in calibration.tensors.items()}
    squares = {name: tensor.mean_squares for name, tensor in calibration.tensors.items()}
    smooth = smoothing(config, found, Activations(channels, squares), weights.read, alpha)
    return Source(bundle, config, calibration, weights, smooth, tuple(found))
