"""`edgepool build-plugins`: what it says when something is missing, and that it leaves nothing half
done. A stand-in for CMake is enough for that; the last tests run the real one."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgepool import plugins_build
from edgepool.cli.main import main
from edgepool.engine import gpu
from edgepool.errors import GateFailed, MissingRequirement
from edgepool.plugin_library import NAME, build_record, installed
from tests.plugins.test_device_compilers import fetched
from tests.test_plugin_library import Library, library  # noqa: F401

# A cmake that notes its arguments and does what CMAKE_DOES says: configure badly, or build.
STAND_IN = """#!{python}
import os, shutil, sys, time
if "--version" in sys.argv:
    print("cmake version", os.environ.get("CMAKE_VERSION", "3.25.1"))
    sys.exit()
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
does = os.environ["CMAKE_DOES"]
if "--build" not in sys.argv:
    if does == "fail to configure":
        print("CMake Error at TensorRT.cmake:3 (message):\\n  No TensorRT headers\\n  here.\\n")
        print("-- Configuring incomplete")
        sys.exit(1)
    sys.exit()
folder = sys.argv[sys.argv.index("--build") + 1]
print("[ 50%] Building CUDA object a.o", flush=True)
if does == "fail to compile":
    print("a.cu(3): error: identifier is undefined\\nmake: *** [all] Error 2")
    sys.exit(2)
if does == "hang":
    time.sleep(100)
shutil.copy(os.environ["BUILT"], folder)
print("[100%] Linking", flush=True)
"""


@pytest.fixture(scope="module")
def built(library: Library) -> Path:  # noqa: F811
    return library()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH, with cmake, nvcc, c++ and make that are no such thing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    text = STAND_IN.format(python=sys.executable, log=str(tmp_path / "log"))
    for name in ("cmake", "nvcc", "c++", "make"):
        program = folder / name
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CUDACXX", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugins_build, "_toolkit_nvcc", lambda: None)
    return folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cmake", "pip install cmake"),
        ("nvcc", "install the CUDA toolkit"),
        ("c++", "apt install g++"),
        ("make", "make or ninja is needed"),
    ],
)
def test_a_missing_tool_is_named_with_what_to_install(
    tools: Path, tmp_path: Path, name: str, message: str
) -> None:
    (tools / name).unlink()
    with pytest.raises(MissingRequirement, match=message.replace("+", r"\+")):
        plugins_build.build(87, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("version", "enough"), [("3.21.9", False), ("3.22.1", True), ("4.0.0", True)]
)
def test_cmake_has_to_be_new_enough(
    tools: Path, monkeypatch: pytest.MonkeyPatch, version: str, enough: bool
) -> None:
    monkeypatch.setenv("CMAKE_VERSION", version)
    if enough:
        assert plugins_build.find_tools()["cmake"] == str(tools / "cmake")
        return
    with pytest.raises(MissingRequirement, match=r"CMake 3\.22 .*cmake is 3\.21\).*pip install"):
        plugins_build.find_tools()


def test_the_nvcc_that_was_asked_for_is_taken(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copy(tools / "nvcc", tmp_path / "other-nvcc"))
    monkeypatch.setenv("CUDACXX", str(other))
    assert plugins_build.find_tools()["nvcc"] == str(other)
    monkeypatch.setenv("CUDACXX", str(tmp_path / "absent"))
    with pytest.raises(MissingRequirement, match="nvcc is needed"):
        plugins_build.find_tools()


@pytest.mark.parametrize(
    ("does", "kind", "message"),
    [
        (
            "fail to configure",
            MissingRequirement,
            "cannot be built here: No TensorRT headers here.$",
        ),
        ("fail to compile", GateFailed, r"do not compile: a\.cu\(3\): error: identifier"),
    ],
)
def test_a_failed_build_leaves_the_old_library(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, kind: Any, message: str
) -> None:
    monkeypatch.setenv("CMAKE_DOES", does)
    out = tmp_path / "out"
    out.mkdir()
    (out / NAME).write_text("old")
    with pytest.raises(kind, match=message):
        plugins_build.build(87, out)
    assert [p.name for p in out.iterdir()] == [NAME]
    assert (out / NAME).read_text() == "old"


def test_a_killed_build_leaves_nothing(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CMAKE_DOES", "hang")
    seen = []

    def echo(line: str) -> None:
        seen.append(line)
        raise KeyboardInterrupt

    monkeypatch.setattr(plugins_build.tempfile, "tempdir", str(tmp_path / "work"))
    (tmp_path / "work").mkdir()
    with pytest.raises(KeyboardInterrupt):
        plugins_build.build(87, tmp_path / "out", echo=echo)
    assert seen == ["[ 50%] Building CUDA object a.o"]
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "work").iterdir())


def test_a_built_library_is_put_in_its_place(
    tools: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CMAKE_DOES", "build")
    monkeypatch.setenv("BUILT", str(built))
    out = tmp_path / "new" / "out"
    old_mask = os.umask(0)
    try:
        code = main(["build-plugins", "--target", "jetson-agx-orin", "-o", str(out), "--json"])
    finally:
        os.umask(old_mask)
    assert code == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert record["library"] == str(out / NAME)
    assert record["sm"] == [87]
    assert "compiling the plugins: 100/100" in printed.err
    assert build_record(out / NAME)["sm"] == [87]
    assert not (out / NAME).stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    configured = (tmp_path / "log").read_text().splitlines()[0]
    assert "-DCMAKE_CUDA_ARCHITECTURES=87-real" in configured
    assert "-DEDGEPOOL_TENSORRT=10" in configured


def test_the_gpu_here_is_built_for_where_engines_look(
    tools: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CMAKE_DOES", "build")
    monkeypatch.setenv("BUILT", str(built))
    monkeypatch.setenv("EDGEPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu, "find", lambda: gpu.Gpu("Orin", 87, 1 << 30, "12.6"))
    assert main(["build-plugins"]) == 0
    assert capsys.readouterr().out.strip() == str(installed())
    monkeypatch.setattr(gpu, "find", lambda: None)
    assert main(["build-plugins"]) == 3
    assert "name one with --target" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["cpu", "rtx-4090"])
def test_targets_without_plugins_are_refused(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build-plugins", "--target", target]) == 2
    assert "%s runs no plugins" % target in capsys.readouterr().err


def test_datacenter_builds_run_on_later_gpus(
    tools: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: Path,
) -> None:
    monkeypatch.setenv("CMAKE_DOES", "build")
    monkeypatch.setenv("BUILT", str(built))
    assert main(["build-plugins", "--target", "a100", "-o", str(tmp_path)]) == 0
    configured = (tmp_path / "log").read_text().splitlines()[0]
    assert "-DCMAKE_CUDA_ARCHITECTURES=80 " in configured  # code and PTX


# ------------------------------------------------------------------------------- the real tools


def nvcc() -> str:
    return shutil.which("nvcc") or pytest.skip("no nvcc on this machine")


def needs_cmake() -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no CMake on this machine")


def test_missing_headers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_cmake()
    nvcc()
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path))
    assert main(["build-plugins", "--target", "jetson-agx-orin", "-o", str(tmp_path / "o")]) == 3
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed.startswith("error: the plugins cannot be built here: No TensorRT headers")
    assert "libnvinfer-dev" in printed
    assert not (tmp_path / "o").exists()


def test_an_architecture_that_nvcc_lacks_is_named(tmp_path: Path) -> None:
    needs_cmake()
    codes = subprocess.run([nvcc(), "--list-gpu-code"], capture_output=True, text=True).stdout
    if "sm_72" in codes.split():
        pytest.skip("this nvcc compiles for sm_72")
    fetched("tensorrt")
    with pytest.raises(MissingRequirement, match="does not compile for sm_72"):
        plugins_build.build(72, tmp_path / "out")


def test_headers_of_another_major_version_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A board with TensorRT 8 cannot load what was compiled for 10."""
    needs_cmake()
    nvcc()
    fetched("tensorrt")
    code = main(["build-plugins", "--target", "jetson-agx-xavier", "-o", str(tmp_path / "o")])
    assert code == 3
    assert "The library is for TensorRT 8, and the headers in" in capsys.readouterr().err


@pytest.mark.slow
def test_two_builds_are_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nvcc, for one GPU, from folders of two names."""
    needs_cmake()
    nvcc()
    digests = []
    for name in ("one", "another-name"):
        monkeypatch.setattr(plugins_build.tempfile, "tempdir", str(tmp_path / name))
        (tmp_path / name).mkdir()
        record = plugins_build.build(87, tmp_path / name / "out")
        assert record["sm"] == [87]
        digests.append((tmp_path / name / "out" / NAME).read_bytes())
    assert digests[0] == digests[1]
