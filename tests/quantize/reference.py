"""The rotated model in PyTorch."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from edgepool.bundle import Bundle
from edgepool.model import Model
from edgepool.quantize.linears import Linear, by_name, groups
from edgepool.quantize.rotation import RotatedWeights


def rotated(weights: RotatedWeights) -> dict[str, torch.Tensor]:
    """The rotated weights as modules have them, [out, in]; a tied head has a table of its own."""
    found = by_name(groups(weights.stored.graph))
    linears: dict[str, Linear] = {
        linear.weight: linear for group in found.values() for linear in group.linears
    }
    result = {}
    for name in weights.stored.tensors:
        if name in Model(weights.config).state_dict():
            array = torch.from_numpy(np.array(weights.read(name)))
            turned = name not in linears or linears[name].turned
            result[name] = array if turned else array.T.contiguous()
    result.setdefault("lm_head.weight", result["embed.weight"])
    return result


def rotated_model(bundle: Bundle) -> Model:
    weights = RotatedWeights.of(bundle)
    model = Model(dataclasses.replace(bundle.config, tie_embeddings=False))
    tensors = rotated(weights)
    if bundle.config.tie_embeddings:  # (x M) E^T = x (E M^T)^T
        tensors["lm_head.weight"] = tensors["embed.weight"] @ torch.from_numpy(weights.head_input())
    model.load_state_dict(tensors)
    return model.requires_grad_(False).eval()
