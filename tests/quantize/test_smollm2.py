"""INT8 on a real model, SmolLM2: calibrated on one part of a text, judged on another."""

from __future__ import annotations

import dataclasses
import pydoc_data.topics
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from edgepool.bundle import Bundle
from edgepool.config import ModelConfig
from edgepool.exporter import lower
from edgepool.exporter.export import FORM, hide_layers
from edgepool.exporter.stamp import model_skeleton
from edgepool.exporter.weights import write_model
from edgepool.quantize import record
from edgepool.quantize.calibrate import Options as Calibration
from edgepool.quantize.calibrate import calibrate
from edgepool.quantize.compare import Graph, compare
from edgepool.quantize.gate import TOKENS
from edgepool.quantize.quantize import Options, judge_fp16, quantize_bundle
from edgepool.quantize.stored import StoredWeights
from edgepool.quantize.variants import stored_weights
from tests.runtime.conftest import smollm2_bundle  # noqa: F401, a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def calibrated(smollm2_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    folder = tmp_path_factory.mktemp("smollm2")
    text = folder / "topics.txt"
    text.write_text("\n\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    path = Path(shutil.copytree(smollm2_bundle, folder / "edgepool-bundle"))
    calibrate(path, Calibration([text]))
    return path


def test_the_default_passes_the_default_gate(
    calibrated: Path, tmp_path: Path, record_property: Record
) -> None:
    path = Path(shutil.copytree(calibrated, tmp_path / "edgepool-bundle"))
    manifest = quantize_bundle(path).manifest
    made = manifest["quantization"]
    record_property("gate", made["gate"])
    assert made["gate"]["limits"] == {"perplexity": 1.0, "agreement": 93.0}
    assert made["kv_dtype"] == "int8"
    assert not made["float_inputs"]
    assert made["int8_multiply_adds"] == 1
    assert made["int8_multiply_adds_once"] >= 0.75
    sizes = [manifest["files"][name]["bytes"] for name in (made["model"], "model.onnx")]
    assert sizes[0] <= 0.35 * sizes[1]


def test_int8_pages_and_index_alone(
    calibrated: Path, tmp_path: Path, record_property: Record
) -> None:
    """FP32 weights and activations: what INT8 storage costs by itself."""
    bundle = Bundle.open(calibrated)
    config = dataclasses.replace(bundle.config, kv_dtype="int8")
    write_fp32(bundle, config, tmp_path / "model.onnx")
    ids = record.read(bundle.file(record.NAME), bundle).held_out[:TOKENS]
    reference = Graph(bundle.model_path, bundle.config)
    result = compare(reference, Graph(tmp_path / "model.onnx", config), ids, layers=False)
    record_property("int8_kv", (result.perplexity_increase, result.agreement, result.kl))
    assert result.perplexity_increase <= 0.2
    assert result.kl < 0.003


def write_fp32(bundle: Bundle, config: ModelConfig, path: Path) -> None:
    """The bundle's model with other state."""
    skeleton = model_skeleton(config, torch.float32)
    hide_layers(skeleton)
    model = ir.serde.serialize_model(skeleton.model)
    stored = StoredWeights.of(bundle.model_path)
    wanted = {v.name: v.type.tensor_type.elem_type for v in model.graph.input[skeleton.inputs :]}
    lowered = lower.portable(ir.serde.deserialize_model(model), FORM, bundle.manifest["opset"])
    write_model(lowered, stored_weights(wanted, stored), path)


def test_fp16_alone(calibrated: Path, record_property: Record) -> None:
    judged = judge_fp16(calibrated, Options())["gate"]
    record_property("fp16", judged)
    assert abs(judged["perplexity_increase"]) <= 0.1
    assert judged["perplexity_error"] <= 0.05  # so many tokens tell 0.1 %
