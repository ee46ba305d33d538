"""The TensorRT session against ONNX Runtime's, over an imitated TensorRT and GPU."""

from __future__ import annotations

import gc
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgepool.bundle import Bundle
from edgepool.engine.profiles import Limits, profiles
from edgepool.errors import BadInput, GateFailed, MissingRequirement
from edgepool.runtime import device_memory, ort_session, trt_session
from edgepool.runtime.cuda_graph import DriverGraphs
from edgepool.runtime.device_memory import CudaPythonDevice, Device, PycudaDevice
from edgepool.runtime.session import Session

from . import fake_tensorrt
from .fake_cuda import FakeRuntime, Gpu, fake_libcuda, fake_pycuda
from .models import token_ids

LIMITS = Limits(batch=2, input_len=16, kv_tokens=200)
PACKAGES = ("pycuda", "cuda-python")


def device_of(gpu: Gpu, package: str, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The product's own device over an imitated package."""
    if package == "cuda-python":
        return CudaPythonDevice(FakeRuntime(gpu))
    graphs = DriverGraphs.__new__(DriverGraphs)
    graphs._cuda = fake_libcuda(gpu)
    monkeypatch.setattr(device_memory, "DriverGraphs", lambda: graphs)
    return PycudaDevice(fake_pycuda(gpu))


def engine_of(bundle: Bundle, limits: Limits, version: str) -> bytes:
    graph = bundle.model_path.read_bytes()
    shapes = fake_tensorrt.profile_shapes(graph, profiles(bundle.config, limits))
    return fake_tensorrt.serialized(graph, version, shapes)


def open_both(
    exported: Path, device: Device, gpu: Gpu, in_place: bool = True, version: str = "10.3.0"
) -> tuple[Session, Session]:
    bundle = Bundle.open(exported / "edgepool-bundle")
    trt = fake_tensorrt.imitation(gpu, version, in_place)
    engine = engine_of(bundle, LIMITS, version)
    session = trt_session.open_session(engine, trt, device, bundle.config, in_place, capacity=96)
    reference = ort_session.open_session(
        bundle.model_path, bundle.config, batch=LIMITS.batch, capacity=96, chunk=16, threads=1
    )
    return session, reference


@pytest.mark.parametrize(
    ("version", "package"), [("8.5.2", "pycuda"), ("10.3.0", "cuda-python")], ids=["8.5", "10.3"]
)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "two buffers"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_same_logits_as_onnx_runtime(
    exported: Path,
    version: str,
    package: str,
    in_place: bool,
    graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And at the end nothing of the GPU is left: no memory, graph, stream or context."""
    gpu = Gpu(graphs)
    device = device_of(gpu, package, monkeypatch)
    session, reference = open_both(exported, device, gpu, in_place, version)
    texts = [token_ids(60, seed=1), token_ids(47, seed=2)]
    steps = [(0, 20), (20, 21), (21, 40), *((i, i + 1) for i in range(40, 47))]
    for begin, end in steps:
        step = [text[begin:end] for text in texts]
        np.testing.assert_allclose(session.feed(step), reference.feed(step), atol=1e-5)
    for s in (session, reference):
        s.rollback([33, 18])
    for i in range(6):
        step = [texts[0][33 + i : 34 + i], texts[1][18 + i : 19 + i]]
        np.testing.assert_allclose(session.feed(step), reference.feed(step), atol=1e-5)
    assert (gpu.launches > 0) == graphs
    assert session.cache_bytes >= reference.cache_bytes * (1 if in_place else 2)
    session.close()
    del session, device
    gc.collect()
    assert gpu.is_clean


def test_logits_that_nobody_reads_stay_where_they_are(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()
    session, reference = open_both(exported, device_of(gpu, "pycuda", monkeypatch), gpu)
    prompt = [token_ids(41, seed=4), token_ids(40, seed=5)]
    np.testing.assert_allclose(session.feed(prompt), reference.feed(prompt), atol=1e-5)
    assert gpu.fetched == 1  # of three steps
    session.close()


def test_only_the_latest_graphs_are_kept(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_session, "TABLE_COLUMNS", 1)  # a shape for every page
    monkeypatch.setattr(trt_session, "MOST_GRAPHS", 3)
    gpu = Gpu()
    session, reference = open_both(exported, device_of(gpu, "pycuda", monkeypatch), gpu)
    for token in token_ids(90, seed=3):
        step = [[token], [token]]
        np.testing.assert_allclose(session.feed(step), reference.feed(step), atol=1e-5)
        assert len(gpu.recorded) <= 3
    session.close()


@pytest.mark.parametrize("package", PACKAGES)
def test_too_little_memory(exported: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(room=20_000)
    device = device_of(gpu, package, monkeypatch)
    with pytest.raises(MissingRequirement, match=r"the GPU has no 0\.\d MiB left"):
        open_both(exported, device, gpu)
    del device
    gc.collect()
    assert gpu.is_clean


def test_an_engine_of_another_model(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(exported / "edgepool-bundle")
    pages = "fp16" if bundle.config.kv_dtype == "int8" else "int8"  # those of INT8 have scales
    config = bundle.config.from_dict({**bundle.config.to_dict(), "kv_dtype": pages})
    engine = engine_of(bundle, LIMITS, "10.3.0")
    other = fake_tensorrt.serialized(b"", "10.9.0", [])
    for data, model, error, words in (
        (engine, config, BadInput, "not one of this model"),
        (b"", bundle.config, GateFailed, "cannot load"),
        (other, bundle.config, GateFailed, "cannot load"),
    ):
        gpu = Gpu()
        device = device_of(gpu, "cuda-python", monkeypatch)
        trt = fake_tensorrt.imitation(gpu, "10.3.0")
        with pytest.raises(error, match=words):
            trt_session.open_session(data, trt, device, model, True)
        gc.collect()
        assert gpu.is_clean


def test_no_more_room_than_the_engine_has(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(exported / "edgepool-bundle")
    engine = engine_of(bundle, Limits(1, 16, 64), "10.3.0")

    def opened(gpu: Gpu, capacity: int | None = None) -> Session:
        trt = fake_tensorrt.imitation(gpu, "10.3.0")
        device = device_of(gpu, "pycuda", monkeypatch)
        return trt_session.open_session(engine, trt, device, bundle.config, True, capacity)

    session = opened(Gpu())
    assert session.capacity == 64
    session.close()
    gpu = Gpu()
    with pytest.raises(BadInput, match="has room for 64 tokens per sequence, not 65"):
        opened(gpu, 65)
    assert not gpu.memory


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_imitation_has_tensorrts_own_signatures() -> None:
    real = pytest.importorskip("tensorrt_rtx_bindings")
    module = fake_tensorrt.imitation(Gpu(), "10.3.0")
    mine = {
        name: getattr(fake_tensorrt, name)
        for name in (
            "IExecutionContext", "ICudaEngine", "IOptimizationProfile", "IBuilderConfig",
            "OnnxParser",
        )
    }  # fmt: skip
    mine.update({n: getattr(module, n) for n in ("Runtime", "Builder", "Logger")})
    mine["INetworkDefinition"] = fake_tensorrt.Network
    checked = 0
    for name, imitated in mine.items():
        for method, function in inspect.getmembers(imitated, inspect.isfunction):
            if method.startswith("_") or method == "check":
                continue
            theirs = getattr(getattr(real, name), method)
            lines = [x for x in (theirs.__doc__ or "").split("\n") if "(self: " in x]
            forms = [re.findall(r"[(,] ?(\w+): ", x.split(" -> ")[0])[1:] for x in lines]
            assert parameters(function) in forms, (name, method, forms)
            checked += 1
    assert checked >= 20


def test_the_imitation_has_cuda_pythons_own_signatures() -> None:
    real = pytest.importorskip("cuda.bindings.runtime")
    checked = 0
    for name, function in inspect.getmembers(FakeRuntime, inspect.isfunction):
        if name.startswith("cuda"):
            assert parameters(function) == parameters(getattr(real, name)), name
            checked += 1
    assert checked >= 17


def test_a_capture_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is as it was, whatever was wrong with what was to be recorded."""
    for package in PACKAGES:
        gpu = Gpu()
        device = device_of(gpu, package, monkeypatch)
        address = device.allocate(4)

        def work(done: bool, gpu: Gpu = gpu, address: int = address) -> bool:
            gpu.set(address, 7, 4, next(iter(gpu.streams)))
            return done

        assert device.capture(lambda: work(False)) is None
        with pytest.raises(ZeroDivisionError):
            device.capture(lambda: 1 // 0 > 0)
        device.synchronize()
        assert gpu.memory[address].tolist() == [0] * 4
        graph = device.capture(lambda: work(True))
        assert graph is not None
        graph.launch()
        device.synchronize()
        assert gpu.memory[address].tolist() == [7] * 4
        graph.close()
        device.close()


def test_no_package_to_reach_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.split(".")[0] in ("pycuda", "cuda"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingRequirement, match=r"edgepool\[tensorrt\]"):
        device_memory.open_device()
