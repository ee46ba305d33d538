"""docs/kernels.md and the program that writes it: what it reads, computes, and finds wrong."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.plugins import toolchain

SCRIPTS = toolchain.ROOT / "scripts"
DOCUMENT = toolchain.ROOT / "docs" / "kernels.md"

# Of nvcc 13 and of clang 19 with CUDA 11.8's ptxas.
PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4fullPf' for 'sm_87'
ptxas info    : Function properties for _Z4fullPf
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 2064 bytes smem
ptxas info    : Compile time = 12.500 ms
ptxas info    : Compiling entry function '_Z4leanPf' for 'sm_72'
ptxas info    : Function properties for _Z4leanPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, 516 bytes cmem[0], 16 bytes cmem[2]
"""


@pytest.fixture(scope="module")
def report() -> ModuleType:
    """scripts/kernel_report.py."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("kernel_report")
    finally:
        sys.path.remove(str(SCRIPTS))


def test_reads_ptxas(report: ModuleType) -> None:
    full, lean = report.kernels("op", PTXAS, {"_Z4fullPf": 128, "_Z4leanPf": 32})
    assert full == report.Kernel("op", "_Z4fullPf", 87, 255, 2064, 60, 128)
    assert lean == report.Kernel("op", "_Z4leanPf", 72, 18, 0, 0, 32)
    with pytest.raises(report.Unknown, match="_Z4leanPf"):
        report.kernels("op", PTXAS.replace("Used 18", "Uses 18"), {})


@pytest.mark.parametrize(
    ("line", "bits"),
    [
        ("LDG.E.128.CONSTANT.SYS R4, [R2]", 128),
        ("LDG.E.U8 R4, desc[UR4][R2.64]", 8),
        ("LDG.E R4, desc[UR4][R2.64]", 32),
        ("LDG.E.EF.64 R4, desc[UR4][R2.64]", 64),
        ("LDGSTS.E.BYPASS.128 [R1], [R2.64]", 128),
    ],
)
def test_reads_load_width_in_sass(report: ModuleType, line: str, bits: int) -> None:
    ((_, suffixes),) = report.SASS.findall("/*0010*/  @P0 %s ;" % line)
    assert report._sass_bits(suffixes) == bits


@pytest.mark.parametrize(
    ("line", "bits"),
    [("ld.global.nc.v4.u32 {%r1, ...}, [%rd1];", 128), ("ld.global.f32 %f1, [%rd1+4];", 32),
     ("ld.global.v2.f32 {%f1, %f2}, [%rd1];", 64), ("ld.global.u16 %rs1, [%rd1];", 16)],
)  # fmt: skip
def test_reads_load_width_in_ptx(report: ModuleType, line: str, bits: int) -> None:
    ((_, suffixes),) = report.PTX.findall(line)
    assert report._ptx_bits(suffixes) == bits


ORACLE = r"""
#include <cstdio>
#include <cuda_occupancy.h>
int main() {
  int sm, registers, threads, warps, kib, reserved;
  size_t shared;
  while (std::scanf("%d %d %d %zu %d %d %d", &sm, &registers, &threads, &shared, &warps, &kib,
                    &reserved) == 7) {
    cudaOccDeviceProp device;
    device.computeMajor = sm / 10, device.computeMinor = sm % 10;
    device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = 32 * warps;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536, device.warpSize = 32;
    device.sharedMemPerMultiprocessor = size_t(kib) << 10;
    device.sharedMemPerBlock = 48 << 10;
    device.sharedMemPerBlockOptin = (size_t(kib) << 10) - size_t(reserved);
    device.reservedSharedMemPerBlock = size_t(reserved);
    device.numSms = 1;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.sharedSizeBytes = 0;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = device.sharedMemPerBlockOptin;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    state.carveoutConfig = 100;  // as much shared memory as there is
    cudaOccResult result;
    const auto error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state,
                                                               threads, shared);
    std::printf("%d\n", error ? -int(error) : result.activeBlocksPerMultiprocessor);
  }
}
"""


def test_occupancy_is_that_of_the_toolkit(report: ModuleType, tmp_path: Path) -> None:
    """cuda_occupancy.h, which knows the blocks of a multiprocessor and all granularities itself."""
    source = tmp_path / "oracle.cpp"
    source.write_text(ORACLE)
    compiler = [toolchain.tool("g++"), "-isystem", toolchain.cuda_include(), source]
    program = toolchain.compile_once("occupancy", compiler, [source])
    asked = [
        (sm, registers, threads, shared)
        for sm in report.MULTIPROCESSORS
        for registers in (18, 32, 64, 72, 128, 168, 255)
        for threads in (32, 128, 256, 512)
        for shared in (0, 100, 9 << 10, 33 << 10, 48 << 10, 90 << 10)
        if registers * threads <= 1 << 16
    ]
    limits = report.MULTIPROCESSORS
    lines = [
        " ".join(map(str, (*a, limits[a[0]].warps, limits[a[0]].shared, limits[a[0]].reserved)))
        for a in asked
    ]
    run = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True)
    expected = list(map(int, run.stdout.split()))
    assert [report.resident_blocks(*a) for a in asked] == expected


def table(report: ModuleType, registers: int = 40, spills: int = 0) -> str:
    kernels = [report.Kernel("op", "_Z4leanPf", sm, registers, 0, spills, 128) for sm in (80, 90)]
    launch = {
        "_Z4leanPf": {"decode": report.Launch(128, 1024), "prefill": report.Launch(128, 9216)}
    }
    return str(report.tables(kernels, launch, ["nvcc 13"]))


def test_finds_a_stale_table(report: ModuleType) -> None:
    document = report.replaced("text\n%s\n%s\nmore\n" % (report.BEGIN, report.END), table(report))
    assert document.startswith("text\n") and document.endswith("\nmore\n")
    assert report.differences(document, table(report), True) == []
    stale = report.differences(document, table(report, registers=48), True)
    assert len(stale) == 2 and "`lean`, sm_80" in stale[0]
    assert any(
        "spilled" in line for line in report.differences(document, table(report, 40, 8), True)
    )
    other = table(report).replace("`lean`", "`leaner`")
    assert any("no more" in line for line in report.differences(document, other, True))
    assert all("nothing" in line for line in report.differences(document, other, False))


def test_document_is_whole() -> None:
    """A row for every kernel in the sources; none spills, and but for the choice among scores all
    load 16 bytes at a time."""
    text = DOCUMENT.read_text()
    assert "spilled**" not in text
    kernel = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(")
    sources = (path.read_text() for path in toolchain.PLUGINS.glob("*/*.cuh"))
    kernels = {name for source in sources for name in kernel.findall(source)}
    assert len(kernels) >= 7
    rows = re.findall(r"^\| `(\w+)[<`][^|]*\|[^|]*\|[^|]*\| (\d+) \|", text, re.MULTILINE)
    assert {name for name, _ in rows} == kernels
    assert {name for name, load in rows if load != "128"} <= {"best_of_part", "best_of_parts"}
