"""A bundle of edgepool-tiny for every kind of reader, without the parity runs of `export`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edgepool import bundle
from edgepool.checkpoint import random_weights
from edgepool.exporter import lower
from edgepool.exporter.export import hide_layers
from edgepool.exporter.stamp import model_skeleton
from edgepool.exporter.weights import weights_of, write_model
from edgepool.model.presets import PRESETS
from edgepool.targets import find_target

TARGETS = ("jetson-agx-xavier", "jetson-agx-orin", "jetson-agx-orin-jp7", "rtx-4090", "cpu")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle's folder."""
    config = PRESETS["edgepool-tiny"]
    folder = tmp_path_factory.mktemp("tiny")
    skeleton = model_skeleton(config, torch.float32)
    hide_layers(skeleton)
    tensors = {name: lazy.read() for name, lazy in random_weights(config, 0).items()}
    weights = weights_of(skeleton, tensors)
    write_model(lower.portable(skeleton.model), weights, folder / "model.onnx")
    variants = {}
    for target in map(find_target, TARGETS):
        name = "model.onnx"
        if target.kind != "cpu":
            name = f"variants/{target.name}/model.onnx"
            (folder / name).parent.mkdir(parents=True)
            if target.runs_plugins:
                known = lower.parser_operators(target.operators)
                graph = lower.for_plugins(skeleton.model, target.opset, known)
            else:
                graph = lower.portable(skeleton.model, target.functions, target.opset)
            write_model(graph, weights, folder / name)
        record = {"opset": target.opset, "ir_version": target.ir_version}
        variants[target.name] = {"model": name, "functions": target.functions, **record}
    bundle.write_manifest(
        folder,
        {
            "format": bundle.FORMAT,
            "version": bundle.VERSION,
            "edgepool": "0",
            "config": config.to_dict(),
            "source_digest": "0" * 64,
            "opset": 20,
            "dtype": "fp32",
            "functions": "auto",
            "variants": variants,
            "quantization": None,
            "reference": None,
            "parity": None,
        },
    )
    return folder
