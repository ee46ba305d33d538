"""The CMake build of the plugins: its presets, and what a library of the emulation exports."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from pathlib import Path

import pytest

from edgepool.ops.registry import operators
from edgepool.plugin_library import NAME, build_record
from edgepool.targets import load_targets
from tests.plugins import toolchain
from tests.plugins.test_device_compilers import fetched

PRESETS = json.loads((toolchain.PLUGINS / "CMakePresets.json").read_text())["configurePresets"]
GPU_PRESETS = {
    preset["name"]: preset["cacheVariables"]["CMAKE_CUDA_ARCHITECTURES"].split(";")
    for preset in PRESETS
    if "CMAKE_CUDA_ARCHITECTURES" in preset.get("cacheVariables", {})
}


def cmake(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [toolchain.tool("cmake"), *map(str, arguments)]
    fetched("tensorrt")
    return subprocess.run(command, capture_output=True, text=True, cwd=toolchain.PLUGINS)


def test_presets_have_the_architectures_of_the_targets() -> None:
    in_presets = {int(a.split("-")[0]) for names in GPU_PRESETS.values() for a in names}
    of_targets = {t.sm for t in load_targets().values() if t.runs_plugins}
    assert of_targets <= in_presets
    newest = max(GPU_PRESETS["datacenter"], key=lambda name: int(name.split("-")[0]))
    assert newest.isdigit()  # code and PTX


@pytest.mark.slow
@pytest.mark.parametrize("preset", GPU_PRESETS)
def test_gpu_presets_configure(preset: str, tmp_path: Path) -> None:
    codes = subprocess.run(
        [toolchain.tool("nvcc"), "--list-gpu-code"], capture_output=True, text=True
    ).stdout.split()
    result = cmake("--preset", preset, "-B", tmp_path)
    wanted = ["sm_" + name.split("-")[0] for name in GPU_PRESETS[preset]]
    if set(wanted) <= set(codes):
        assert result.returncode == 0, result.stderr
        written = (tmp_path / "record.cpp").read_text()
        numbers = ", ".join(name.split("-")[0] for name in GPU_PRESETS[preset])
        assert '"sm": [%s]' % numbers in written
    else:
        assert result.returncode != 0
        assert "does not compile for" in result.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("EDGEPOOL_EMULATION=fast", "is plain, checked, asan or tsan, not fast"),
        ("TENSORRT_ROOT=/nonexistent", "No TensorRT headers"),
    ],
)
def test_mistakes_are_named(option: str, message: str, tmp_path: Path) -> None:
    result = cmake("--preset", "emulated", "-B", tmp_path, "-D", option)
    assert result.returncode != 0
    assert message in " ".join(result.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "kind", "entry"),
    [
        ("emulated", "plain", "getCreators"),
        ("emulated-v2", "plain", "getPluginCreators"),
        ("emulated", "checked", "getCreators"),
        ("emulated", "asan", "getCreators"),
    ],
)
def test_the_emulation_is_built(preset: str, kind: str, entry: str, tmp_path: Path) -> None:
    configured = cmake("--preset", preset, "-B", tmp_path, "-D", "EDGEPOOL_EMULATION=" + kind)
    assert configured.returncode == 0, configured.stderr
    built = cmake("--build", tmp_path, "--parallel", 2)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr
    record = build_record(tmp_path / NAME)
    assert record["emulated"]
    assert len(record["operators"]) == len(operators())
    if kind == "asan":  # loads into a process that has the sanitizer's library first
        symbols = subprocess.run(
            ["nm", "-D", "--defined-only", tmp_path / NAME], capture_output=True, text=True
        )
        assert " T " + entry in symbols.stdout
        return
    library = ctypes.CDLL(str(tmp_path / NAME), os.RTLD_NOW)
    count = ctypes.c_int32()
    function = getattr(library, entry)
    function.restype = ctypes.c_void_p
    assert function(ctypes.byref(count))
    assert count.value == len(operators())
