"""The plugins for TensorRT 8.5, whose headers no registry has: they use nothing that it lacks, and
compile where extents are 32-bit, as they are there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.plugins import toolchain
from tests.plugins.test_device_compilers import fetched

COMMON = toolchain.PLUGINS / "common"
SOURCES = [COMMON / name for name in ("tensorrt.hpp", "tensorrt.cpp", "plugin_v2.cpp")]
API = Path(__file__).with_name("tensorrt_8_5_api.txt")


def allowed() -> set[str]:
    lines = API.read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def code_for_8_5(path: Path) -> str:
    """A source without comments, strings and what is compiled for later versions only."""
    text = re.sub(r"//.*|\"(?:\\.|[^\"\\\n])*\"", "", path.read_text())
    kept, later = [], False
    for line in text.splitlines():
        if line.startswith("#if !EDGEPOOL_USES_V2"):
            later = True
        elif later and line.startswith("#endif"):
            later = False
        elif not later:
            kept.append(line)
    return "\n".join(kept)


def used(code: str, headers: str) -> set[str]:
    """What the code names of TensorRT: qualified names, overrides, and members that it declares."""
    names = set(re.findall(r"nvinfer1::(\w+(?:::\w+)*)", code))
    names |= set(re.findall(r"(\w+)\([^()]*(?:\([^()]*\))?[^()]*\)[\sa-z]*\boverride\b", code))
    declared = set(re.findall(r"\b([A-Za-z]\w*)\s*[(;{\[]", headers))
    return names | (set(re.findall(r"(?:\.|->)([A-Za-z]\w*)", code)) & declared)


def header_text(folder: Path) -> str:
    text = "".join(path.read_text() for path in sorted(folder.glob("NvInfer*.h")))
    return re.sub(r"//.*", "", text)


def test_nothing_is_used_that_8_5_lacks() -> None:
    headers = header_text(fetched("tensorrt"))
    code = "\n".join(code_for_8_5(path) for path in SOURCES)
    names = used(code, headers)
    assert {"IPluginV2DynamicExt", "enqueue", "registerCreator", "nbDims"} <= names
    assert names - allowed() == set()


@pytest.mark.parametrize(
    "newer",
    [
        "nvinfer1::DataType::kBF16",
        "nvinfer1::DataType::kINT64",
        "nvinfer1::IPluginV3* p;",
        "registry->loadLibrary(path);",
        "tensor.opt.nbDims",
        "int32_t getAliasedInput(int32_t output) noexcept override {",
    ],
)
def test_what_8_5_lacks_is_seen(newer: str) -> None:
    assert used(newer, header_text(fetched("tensorrt"))) - allowed()


@pytest.fixture(scope="module")
def narrow_headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TensorRT's headers with the 32-bit extents of version 8, kept where objects are."""
    folder = tmp_path_factory.mktemp("headers") / "tensorrt"
    shutil.copytree(fetched("tensorrt"), folder)
    narrow = {
        "NvInferRuntimeBase.h": ("int64_t d[MAX_DIMS];", "int32_t d[MAX_DIMS];"),
        "NvInferLegacyDims.h": ("int64_t", "int32_t"),
        "NvInferRuntime.h": ("constant(int64_t value)", "constant(int32_t value)"),
    }
    for name, (wide, replaced) in narrow.items():
        text = (folder / name).read_text()
        assert wide in text
        (folder / name).write_text(text.replace(wide, replaced))
    kept = toolchain.BUILD / "tensorrt-with-32-bit-extents"
    if not kept.exists():
        toolchain.BUILD.mkdir(parents=True, exist_ok=True)
        folder.rename(kept)
    return kept


@pytest.mark.parametrize("name", ["tensorrt.cpp", "plugin_v2.cpp", "instance.cpp"])
@pytest.mark.parametrize("extents", [32, 64])
def test_it_compiles_without_conversions(name: str, extents: int, narrow_headers: Path) -> None:
    headers = narrow_headers if extents == 32 else fetched("tensorrt")
    compiler = toolchain.tool("g++")
    command = [*toolchain.base_flags(compiler), "-Wconversion", "-DEDGEPOOL_PLUGIN_V2"]
    command += ["-isystem", headers, "-c", COMMON / name]
    sources = toolchain.with_includes(COMMON / name)
    toolchain.compile_once("8.5-%d-%s.o" % (extents, name), command, sources)
