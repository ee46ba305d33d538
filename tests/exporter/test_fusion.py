"""What ONNX Runtime makes of the graph: the fusions that decode speed depends on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime as ort


def test_norms_and_activations_are_fused(sparse: Path, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    model = sparse / "edgepool-bundle" / "model.onnx"
    ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    layers = 2
    found = Counter(node.op_type for node in optimized.graph.node)
    assert found["SimplifiedLayerNormalization"] == 2 * layers + 1
    assert found["QuickGelu"] == layers  # x * sigmoid(x)
    assert found["MatMul"] >= 7 * layers
    assert found["Gemm"] == 1
    # Shapes are constants: what computes them is the operators' own.
    plain = onnx.load(model)
    outside = Counter(node.op_type for node in plain.graph.node if not node.domain)
    assert outside["Shape"] <= 3
    assert sum(outside.values()) <= 40 * layers + 40
