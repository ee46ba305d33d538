"""The TensorRT session against ONNX Runtime's, over an imitated TensorRT and GPU."""

from __future__ import annotations

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
from edgepool.runtime.session import Session

from .fake_tensorrt import FakeContext, FakeDevice, FakeEngine, fake_tensorrt
from .models import token_ids

LIMITS = Limits(batch=2, input_len=16, kv_tokens=200)


def open_both(
    exported: Path, in_place: bool, graphs: bool, limits: Limits = LIMITS
) -> tuple[Session, Session, FakeDevice]:
    bundle = Bundle.open(exported / "edgepool-bundle")
    device = FakeDevice(graphs)
    trt = fake_tensorrt(device, profiles(bundle.config, limits), in_place)
    graph = bundle.model_path.read_bytes()
    session = trt_session.open_session(graph, trt, device, bundle.config, in_place, capacity=96)
    reference = ort_session.open_session(
        bundle.model_path, bundle.config, batch=limits.batch, capacity=96, chunk=16, threads=1
    )
    return session, reference, device


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "two buffers"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_same_logits_as_onnx_runtime(exported: Path, in_place: bool, graphs: bool) -> None:
    session, reference, device = open_both(exported, in_place, graphs)
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
    assert (device.launches > 0) == graphs
    assert session.cache_bytes >= reference.cache_bytes * (1 if in_place else 2)


def test_memory_is_given_back(exported: Path) -> None:
    session, _, device = open_both(exported, True, True)
    session._backend.close()  # type: ignore[attr-defined]
    assert device.closed


def test_an_engine_of_another_model(exported: Path) -> None:
    bundle = Bundle.open(exported / "edgepool-bundle")
    device = FakeDevice()
    trt = fake_tensorrt(device, profiles(bundle.config, LIMITS), True)
    config = bundle.config.from_dict({**bundle.config.to_dict(), "kv_dtype": "fp16"})
    graph = bundle.model_path.read_bytes()
    if config != bundle.config:  # INT8 pages have scales
        with pytest.raises(BadInput, match="not one of this model"):
            trt_session.open_session(graph, trt, device, config, True)
    with pytest.raises(GateFailed, match="cannot load"):
        trt_session.open_session(b"", trt, device, bundle.config, True)


def test_no_more_room_than_the_engine_has(exported: Path) -> None:
    bundle = Bundle.open(exported / "edgepool-bundle")
    device = FakeDevice()
    trt = fake_tensorrt(device, profiles(bundle.config, Limits(1, 16, 64)), True)
    graph = bundle.model_path.read_bytes()
    assert trt_session.open_session(graph, trt, device, bundle.config, True).capacity == 64
    with pytest.raises(BadInput, match="has room for 64 tokens per sequence, not 65"):
        trt_session.open_session(graph, trt, device, bundle.config, True, capacity=65)


def test_the_imitation_has_tensorrts_own_signatures() -> None:
    real = pytest.importorskip("tensorrt_rtx_bindings")
    for mine, name in ((FakeContext, "IExecutionContext"), (FakeEngine, "ICudaEngine")):
        theirs = getattr(real, name)
        for method, function in inspect.getmembers(mine, inspect.isfunction):
            if method.startswith("_"):
                continue
            text = (getattr(theirs, method).__doc__ or "").split("\n")[0]
            parameters = re.findall(r"(\w+): ", text.split("->")[0])
            if parameters:  # overloaded methods do not say
                assert list(inspect.signature(function).parameters) == parameters, method


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
