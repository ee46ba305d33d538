"""Where `build-engine` builds for, on machines that are imitated."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from edgepool import plugin_library
from edgepool.engine import gpu, tensorrt_api
from edgepool.engine.place import place_for
from edgepool.errors import BadInput, MissingRequirement

ORIN = gpu.Gpu("Orin", 87, 32 << 30, "12.6")
XAVIER = gpu.Gpu("Xavier", 72, 32 << 30, "11.4")
ORINS = ["jetson-agx-orin", "jetson-agx-orin-jp5", "jetson-agx-orin-jp7"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that gives this machine a GPU, a TensorRT, and plugins for them."""

    def give(here: gpu.Gpu, version: str, **plugins: Any) -> None:
        major, minor = (int(x) for x in version.split(".")[:2])
        trt = types.SimpleNamespace(__version__=version)
        api = tensorrt_api.Api("tensorrt", trt, (major, minor))
        record = {"tensorrt": version, "sm": [here.sm], "ptx": [], **plugins}
        monkeypatch.setattr(gpu, "find", lambda: here)
        monkeypatch.setattr(tensorrt_api, "find", lambda runtime: api)
        monkeypatch.setattr(plugin_library, "installed", lambda: Path("libedgepool_plugins.so"))
        monkeypatch.setattr(plugin_library, "build_record", lambda path: record)

    return give


@pytest.mark.parametrize(
    ("here", "version", "variants", "name"),
    [
        (XAVIER, "8.5.2.2", [], "jetson-agx-xavier"),
        (ORIN, "8.5.2.2", ORINS, "jetson-agx-orin-jp5"),
        (ORIN, "10.3.0.30", ORINS, "jetson-agx-orin"),
        (ORIN, "10.16.2", ORINS, "jetson-agx-orin-jp7"),
        (ORIN, "10.16.2", ["jetson-agx-orin"], "jetson-agx-orin"),
        (ORIN, "11.4.1", [], "jetson-agx-orin-jp7"),
    ],
)
def test_a_board_is_the_target_of_its_tensorrt(
    machine: Any, here: gpu.Gpu, version: str, variants: list[str], name: str
) -> None:
    machine(here, version)
    place = place_for(None, "auto", variants)
    assert (place.name, place.runtime, place.elsewhere) == (name, "tensorrt", False)
    assert place_for(name, "auto").target == place.target


@pytest.mark.parametrize(
    ("here", "version", "wanted", "words"),
    [
        (ORIN, "8.5.2.2", "jetson-agx-orin", "choose --target jetson-agx-orin-jp5"),
        (ORIN, "10.3.0", "jetson-agx-orin-jp5", "is for TensorRT 8.5.2.2, and here is TensorRT 10"),
        (XAVIER, "10.3.0", None, "jetson-agx-xavier is for TensorRT 8.5.2.2, and here is TensorRT"),
    ],
)
def test_a_tensorrt_of_the_wrong_major_is_named(
    machine: Any, here: gpu.Gpu, version: str, wanted: str | None, words: str
) -> None:
    machine(here, version)
    with pytest.raises(MissingRequirement, match=words):
        place_for(wanted, "auto")


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        ({"tensorrt": "8.5.2"}, "it is for TensorRT 8.5.2, and here is TensorRT 10.3.0"),
        ({"sm": [72]}, r"it has no code for Orin \(sm_87\)"),
        ({"sm": [72], "ptx": [90]}, r"it has no code for Orin \(sm_87\)"),
    ],
)
def test_plugins_for_another_machine_are_named(
    machine: Any, plugins: dict[str, Any], words: str
) -> None:
    machine(ORIN, "10.3.0", **plugins)
    with pytest.raises(MissingRequirement, match=words + ": `edgepool build-plugins`"):
        place_for(None, "auto")


def test_ptx_of_an_older_gpu_is_code_for_it(machine: Any) -> None:
    machine(ORIN, "10.3.0", sm=[72], ptx=[80])
    assert place_for(None, "auto").plugins is not None


def test_no_plugin_library(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(ORIN, "10.3.0")
    monkeypatch.setattr(plugin_library, "installed", lambda: None)
    with pytest.raises(MissingRequirement, match="no plugin library is built: `edgepool build-pl"):
        place_for(None, "auto")


def test_a_geforce_is_built_for_by_rtx(machine: Any) -> None:
    machine(gpu.Gpu("GeForce RTX 4090", 89, 24 << 30, "13.0"), "10.16.1")
    assert place_for(None, "auto").name == "l4"  # the same chip, with plugins
    with pytest.raises(BadInput, match="rtx-4090 is built for by TensorRT-RTX"):
        place_for("rtx-4090", "tensorrt")


def test_an_unknown_gpu(machine: Any) -> None:
    machine(gpu.Gpu("Thor", 110, 128 << 30, "13.0"), "10.16.2")
    with pytest.raises(MissingRequirement, match=r"Thor \(compute capability 11.0\) is no target"):
        place_for(None, "auto")
