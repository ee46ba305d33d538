"""The kernel sources that the emulation runs are what nvcc and clang compile for every target.

Needs nvcc 13, and for sm_72 clang-19 with what scripts/toolchains.sh fetches; no GPU. All kernels
for all targets take 4 to 20 minutes of a core, so `make test` compiles a part: one operator for
three architectures, another for one, and attention for INT8 pages and D up to 64.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.assets import cache_folder
from tests.plugins import toolchain

slow = pytest.mark.slow
SOURCE = Path(__file__).parent / "emulation" / "device.cu"
SMS = (80, 86, 87, 89, 90, 100, 120)
NARROW = Path(__file__).parent / "shared_kv_narrow_entry.cpp"


def fetched(name: str) -> Path:
    """A part of what scripts/toolchains.sh fetched."""
    folder = Path(os.environ.get("EDGEPOOL_TOOLCHAINS") or cache_folder() / "toolchains") / name
    if not folder.exists():
        pytest.skip("not fetched: %s (scripts/toolchains.sh)" % folder)
    return folder


def compile_kernels(*arguments: str) -> str:
    """What scripts/compile_kernels.py --check says; fails with it, and where a compiler is missing
    skips."""
    toolchain.tool("nvcc")
    toolchain.tool("clang++-19")
    fetched("tools")
    script = str(toolchain.ROOT / "scripts" / "compile_kernels.py")
    run = subprocess.run(
        [sys.executable, script, "--check", *arguments], capture_output=True, text=True
    )
    if run.returncode:
        pytest.fail(run.stdout + run.stderr, pytrace=False)
    return run.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        "--operator index_pool --sm 72 --sm 87 --sm 120",
        "--operator index_pool_select --sm 87",
    ],
)
def test_some_kernels_for_some_architectures(arguments: str) -> None:
    """They compile, spill nothing, and are what docs/kernels.md says."""
    assert re.search(r"^\d+ kernels, 0 faults$", compile_kernels(*arguments.split()), re.M)


@pytest.mark.parametrize("sm", [72, 87])
def test_narrow_attention(sm: int, tmp_path: Path) -> None:
    output = tmp_path / "narrow.o"
    if sm == 72:
        command = clang_command(fetched("cuda-11.8"), "-DGPU_ONLY_ARCH=72")
    else:
        command = nvcc_command([sm], "-DGPU_ONLY_ARCH=80", "-x", "cu")
    run = subprocess.run(
        [*map(str, command), "-c", str(NARROW), "-o", str(output)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "attend_tile" in run.stderr
    assert_no_spills(run.stderr)


@slow
@pytest.mark.timeout(5400)
def test_every_kernel_for_every_architecture() -> None:
    """With a whole plugin library for each, linked."""
    assert re.search(r"^\d+ kernels, 0 faults$", compile_kernels(), re.M)


def nvcc_command(sms: Sequence[int], *flags: str) -> list[object]:
    command = [toolchain.tool("nvcc"), "-std=c++17", "-O3", "-I", toolchain.PLUGINS, *flags]
    command += ["-gencode=arch=compute_%d,code=sm_%d" % (sm, sm) for sm in sms]
    warnings = "-Xcompiler=-fPIC,-Wall,-Wextra,-Werror"
    return [*command, "--threads=2", "-Werror=all-warnings", warnings, "-Xptxas=-v"]


def clang_command(tree: Path, *flags: str) -> list[object]:
    return [
        toolchain.tool("clang++-19"), "-std=c++17", "-O3", "-x", "cuda", "-I", toolchain.PLUGINS,
        "--cuda-path=%s" % tree, "--cuda-gpu-arch=sm_72", "-Wno-unknown-cuda-version",
        "-Wno-pass-failed", *toolchain.WARNINGS, "-Xcuda-ptxas", "-v", "-fPIC", *flags,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def nvcc_build() -> tuple[Path, str]:
    """A shared library for all of SMS, and what ptxas said."""
    library = toolchain.BUILD / "device-nvcc.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(
        [*map(str, nvcc_command(SMS)), "-shared", str(SOURCE), "-o", str(library)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return library, run.stderr


def assert_no_spills(ptxas: str) -> None:
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ptxas)
    assert spills and set(spills) == {("0", "0")}


@slow
def test_nvcc_compiles_every_architecture(nvcc_build: tuple[Path, str]) -> None:
    _, ptxas = nvcc_build
    for sm in SMS:
        assert "mma_product" in "".join(
            re.findall(r"entry function '(\w+)' for 'sm_%d'" % sm, ptxas)
        )
    assert_no_spills(ptxas)


@pytest.mark.parametrize("cuda", ["cuda-11.8", "cuda-12.6"])
def test_clang_compiles_for_xavier(cuda: str, tmp_path: Path) -> None:
    tree = fetched(cuda)
    link = ["-shared", SOURCE, "-L%s" % (tree / "lib64"), "-lcudart", "-o", tmp_path / "device.so"]
    command = [*clang_command(tree), *link]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "for 'sm_72'" in run.stderr
    assert_no_spills(run.stderr)


def sass(library: Path, sm: int) -> dict[str, list[str]]:
    """The instructions of each kernel, by its (mangled) name, without registers."""
    cuobjdump = fetched("tools") / "cuobjdump"
    environment = {**os.environ, "PATH": "%s:%s" % (fetched("tools"), os.environ["PATH"])}
    text = subprocess.run(
        [str(cuobjdump), "-sass", "-arch", "sm_%d" % sm, str(library)],
        capture_output=True, text=True, check=True, env=environment,
    ).stdout  # fmt: skip
    kernels: dict[str, list[str]] = {}
    for line in text.splitlines():
        name = re.search(r"Function : (\w+)", line)
        instruction = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?([A-Z][\w.]*)", line)
        if name:
            current = kernels.setdefault(name.group(1), [])
        elif instruction:
            current.append(instruction.group(1))
    return kernels


@slow
@pytest.mark.parametrize("sm", [80, 87, 120])
def test_accessors_cost_nothing_and_wrappers_are_one_instruction(
    nvcc_build: tuple[Path, str], sm: int
) -> None:
    kernels = sass(nvcc_build[0], sm)
    assert kernels["copy_words"] == kernels["copy_words_plain"]
    assert kernels["copy_vectors"] == kernels["copy_vectors_plain"]

    def has(kernel: str, instruction: str) -> bool:
        (name,) = [k for k in kernels if kernel in k]
        return any(i.startswith(instruction) for i in kernels[name])

    assert has("copy_halves", "LDG.E.128") and has("copy_halves", "STG.E.128")
    # The mangled names hold the length of the kernel's name before it.
    assert has("11mma_product", "LDGSTS") and has("11mma_product", "LDSM.16.M88.4")
    assert has("11mma_product", "HMMA.16816.F32") and has("mma_product_int8", "IMMA.16832.S8.S8")
    assert has("dot_int8", "IDP.4A") and has("producer_consumer", "BAR.ARV")
