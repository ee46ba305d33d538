"""The real parser: TensorRT-RTX reads the exported graph, and builds an engine without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from edgepool.checkpoint import import_checkpoint
from edgepool.checkpoint.retrofit import Retrofit
from edgepool.cli.main import main
from edgepool.exporter.export import Options, export
from tests.ops.harness import model
from tests.ops.test_bodies import attention_site

trt = pytest.importorskip(
    "tensorrt_rtx_bindings", reason="tensorrt-rtx is not installed: pip install 'edgepool[rtx]'"
)

SIZES = {
    "batch": (1, 1, 2),
    "seq": (1, 1, 128),
    "rows": (1, 1, 2),
    "logical_pages": (4, 8, 64),
    "pages": (5, 17, 129),
}


def build(path: Path, sizes: dict[str, tuple[int, int, int]]) -> tuple[int, int]:
    """Parse a file and build an engine for sm_89; (layers, bytes of the engine)."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network()
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(path))
    errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
    assert parsed, errors
    configuration = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for value in onnx.load(path, load_external_data=False).graph.input:
        shape = value.type.tensor_type.shape.dim
        if any(d.dim_param for d in shape):
            bounds: list[Any] = [
                tuple(sizes[d.dim_param][i] if d.dim_param else d.dim_value for d in shape)
                for i in range(3)
            ]
            profile.set_shape(value.name, *bounds)
    configuration.add_optimization_profile(profile)
    configuration.num_compute_capabilities = 1
    configuration.set_compute_capability(trt.ComputeCapability.SM89, 0)
    engine = builder.build_serialized_network(network, configuration)
    assert engine is not None
    return network.num_layers, engine.nbytes


def test_edgepool_tiny(tmp_path: Path) -> None:
    assert main(["init", "edgepool-tiny", "-o", str(tmp_path / "tiny.pt"), "--seed", "1"]) == 0
    bundle = export(tmp_path / "tiny.pt", Options(tmp_path / "b", ("rtx-4090",)))
    layers, size = build(bundle.variant_path("rtx-4090"), SIZES)
    assert layers > 100
    assert size > 100_000


def test_fewer_blocks_than_a_query_may_choose(tmp_path: Path) -> None:
    """A context that is never longer than the budget."""
    site = attention_site(select=1, K=20)
    onnx.save(model(site, "mask"), tmp_path / "model.onnx")
    build(
        tmp_path / "model.onnx", {"B": (1, 1, 1), "S": (1, 1, 9), "MP": (1, 2, 4), "NP": (2, 3, 5)}
    )


@pytest.mark.slow
def test_smollm2(smollm2_gguf: Path, tmp_path: Path) -> None:
    import_checkpoint(smollm2_gguf, tmp_path / "model.pt", Retrofit())
    bundle = export(tmp_path / "model.pt", Options(tmp_path / "b", ("rtx-4090",)))
    layers, size = build(bundle.variant_path("rtx-4090"), SIZES)
    assert layers > 1000
    assert size > 10_000_000
