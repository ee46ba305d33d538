"""TensorRT-RTX on INT8 and FP16 graphs of edgepool-tiny: what it reads, engines for every GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgepool.bundle import Bundle
from edgepool.engine import build, tensorrt_api
from edgepool.engine.graphs import graph_of
from edgepool.engine.place import Place
from edgepool.engine.profiles import Limits
from edgepool.exporter.probe import read_graph
from edgepool.progress import silent
from edgepool.quantize import gate
from edgepool.quantize.calibrate import Options as Calibration
from edgepool.quantize.calibrate import calibrate
from edgepool.quantize.linears import groups
from edgepool.quantize.quantize import Options, quantize_bundle
from edgepool.quantize.variants import add_fp16
from tests.runtime.conftest import smollm2_bundle  # noqa: F401, a fixture

trt = pytest.importorskip(
    "tensorrt_rtx_bindings", reason="tensorrt-rtx is not installed: pip install 'edgepool[rtx]'"
)

GPUS = (80, 86, 89, 120)


@pytest.fixture(scope="module")
def bundle(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """edgepool-tiny with its INT8 and FP16 graphs."""
    path = tmp_path_factory.mktemp("rtx") / "edgepool-bundle"
    shutil.copytree(tiny, path, ignore=shutil.ignore_patterns("engines"))
    quantize_bundle(path)
    return add_fp16(path)


class Network:
    """The layers that TensorRT-RTX's parser makes of a graph."""

    def __init__(self, bundle: Bundle, precision: str) -> None:
        api = tensorrt_api.find("rtx")
        self._log = tensorrt_api.error_log(api)
        self._builder = trt.Builder(self._log)  # has to outlive the network
        self._network = tensorrt_api.create_network(api, self._builder)
        graph = graph_of(bundle, None, precision, "rtx")
        parser = trt.OnnxParser(self._network, self._log)
        assert parser.parse(graph.proto, str(graph.weights_path)), parser.get_error(0).desc()
        self.layers = [self._network.get_layer(i) for i in range(self._network.num_layers)]
        self.made_by = {
            layer.get_output(i).name: layer
            for layer in self.layers
            for i in range(layer.num_outputs)
        }

    def products(self) -> dict[str, Any]:
        """The products of linear layers, by the names of the graph's nodes."""
        found = [x for x in self.layers if x.type == trt.LayerType.MATRIX_MULTIPLY]
        return {layer.name: layer for layer in found}

    def back(self, layer: Any, i: int) -> Iterator[Any]:
        """The layers that give an input, without those that change its shape only."""
        value = layer.get_input(i)
        while value is not None and value.name in self.made_by:
            layer = self.made_by[value.name]
            if layer.type != trt.LayerType.SHUFFLE:
                yield layer
            value = layer.get_input(0)


def assert_int8(bundle: Bundle) -> int:
    """Every product of a linear layer has two INT8 sides; returns how many there are."""
    network = Network(bundle, "int8")
    products = network.products()
    assert bundle.manifest["quantization"]["int8_multiply_adds"] == 1
    linears = [
        linear for group in groups(read_graph(bundle.model_path).graph) for linear in group.linears
    ]
    for linear in linears:
        product = products[linear.node]
        dequantize, constant = list(network.back(product, 1))[:2]
        assert dequantize.type == trt.LayerType.DEQUANTIZE, linear.name
        assert constant.get_output(0).dtype == trt.DataType.INT8, linear.name
        given = [layer.type for layer in network.back(product, 0)][:2]
        assert given == [trt.LayerType.DEQUANTIZE, trt.LayerType.QUANTIZE], linear.name
    return len(linears)


def test_every_linear_layer_is_int8_as_the_record_says(bundle: Bundle) -> None:
    assert assert_int8(bundle) > 20


def test_every_product_of_fp16_is_fp16(bundle: Bundle) -> None:
    products = Network(bundle, "fp16").products()
    for group in groups(read_graph(bundle.model_path).graph):
        for linear in group.linears:
            product = products[linear.node]
            types = {product.get_input(i).dtype for i in (0, 1)} | {product.get_output(0).dtype}
            assert types == {trt.DataType.HALF}, linear.name


def built(bundle: Bundle, precision: str, gpus: tuple[int, ...], path: Path) -> dict[str, Any]:
    place = Place("rtx", "rtx", None, compute_capabilities=gpus)
    graph = graph_of(bundle, None, precision, "rtx")
    options = build.Options(precision=precision)
    return build.run(graph, place, options, Limits(1, 32, 256), bundle, path, silent)


@pytest.mark.parametrize(("precision", "dtype"), [("int8", "int8"), ("fp16", "half")])
def test_one_engine_for_every_gpu(
    bundle: Bundle, precision: str, dtype: str, tmp_path: Path
) -> None:
    facts = built(bundle, precision, GPUS, tmp_path / "engine")
    assert facts["layer_types"][dtype] > 100
    assert (tmp_path / "engine").stat().st_size > 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "fp16"])
@pytest.mark.parametrize("gpu", GPUS)
def test_an_engine_for_each_gpu(bundle: Bundle, precision: str, gpu: int, tmp_path: Path) -> None:
    built(bundle, precision, (gpu,), tmp_path / "engine")
    assert (tmp_path / "engine").stat().st_size > 1_000_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2_in_int8(smollm2_bundle: Path, tmp_path: Path) -> None:  # noqa: F811
    """Calibrated on noise: the form is the same."""
    path = Path(shutil.copytree(smollm2_bundle, tmp_path / "edgepool-bundle"))
    ids = np.random.default_rng(0).integers(0, 49152, 600).astype(np.int32)
    np.savez(tmp_path / "ids.npz", input_ids=ids)
    calibrate(path, Calibration([tmp_path / "ids.npz"], samples=2, length=128))
    anything = Options(limits=gate.Limits(perplexity=1e9, agreement=0), tokens=64)
    bundle = quantize_bundle(path, anything)
    assert assert_int8(bundle) == 30 * 7 + 1
    facts = built(bundle, "int8", (89,), tmp_path / "engine")
    assert facts["layer_types"]["int8"] > 500
    assert (tmp_path / "engine").stat().st_size > 10_000_000
