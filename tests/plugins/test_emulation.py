"""The emulation computes what CUDA C++ says, and names every fault that is planted in a kernel."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

from tests.plugins import toolchain

SOURCES = Path(__file__).parent / "emulation"
FAULTS = SOURCES / "faults.cpp"

# What each kernel of faults.cpp is reported as. Faults of structure are found in every build...
STRUCTURE = {
    "partial_barrier": "divergent barrier",
    "two_barriers": "divergent barrier",
    "barrier_counts": "divergent barrier",
    "unmet_arrival": "divergent barrier",
    "barrier_zero": "bad barrier",
    "lost_warp": "deadlock",
    "crossed_waits": "deadlock",
    "not_in_mask": "bad mask",
    "masks_disagree": "bad mask",
    "source_not_in_mask": "bad mask",
    "source_has_exited": "bad mask",
    "two_collectives": "divergent warp",
    "matrix_without_lanes": "divergent warp",
    "wmma_without_lanes": "divergent warp",
    "misaligned_load": "misaligned access",
    "misaligned_store": "misaligned access",
    "misaligned_row": "misaligned access",
    "misaligned_copy": "misaligned access",
    "misaligned_tile": "misaligned access",
    "misaligned_stride": "misaligned access",
    "gives_up": "trap",
}
# ... those of an older device when it is imitated ...
UNSUPPORTED = ("new_copy", "new_ldmatrix", "new_mma", "new_mma_int8", "new_reduce")
# ... and those of memory by the runtime that watches every access.
MEMORY = {
    "misaligned_vector": "misaligned access",
    "missing_barrier": "race",
    "missing_second_barrier": "race",
    "missing_syncwarp": "race",
    "shuffle_is_no_barrier": "race",
    "syncwarp_is_no_block_barrier": "race",
    "overfull_buffer": "race",
    "blocks_collide": "race",
    "read_by_another_block": "race",
    "missing_fence": "race",
    "counted_too_early": "race",
    "plain_and_atomic": "race",
    "wait_without_barrier": "race",
    "copy_over_readers": "race",
    "missing_wait": "copy in flight",
    "copy_to_global": "out of bounds",
    "copy_beyond_the_end": "out of bounds",
    "beyond_the_end": "out of bounds",
    "beyond_dynamic": "out of bounds",
    "given_back": "out of bounds",
    "unwritten_shared": "uninitialised read",
    "unwritten_dynamic": "uninitialised read",
    "left_by_another_block": "uninitialised read",
    "unwritten_workspace": "uninitialised read",
    "uncounted": "uncounted access",
}
# What the sanitizers say of the same kernels.
ADDRESS = {
    "beyond_the_end": "heap-buffer-overflow",
    "beyond_dynamic": "heap-buffer-overflow",
    "beyond_static": "out of bounds",
    "given_back": "heap-use-after-free",
    "copy_beyond_the_end": "out of bounds",
    "misaligned_vector": "misaligned address",
}
THREAD = {
    "missing_second_barrier",
    "shuffle_is_no_barrier",
    "syncwarp_is_no_block_barrier",
    "overfull_buffer",
}
HARMLESS = ("counted_in_time",)


def planted_line(name: str) -> str:
    """FILE:LINE of the fault, by the comment that marks it."""
    lines = FAULTS.read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith("// FAULT: " + name)]
    return "faults.cpp:%d" % number


@functools.lru_cache(maxsize=None)
def reports(kind: str, schedule: str, sm: int, names: tuple[str, ...]) -> dict[str, list[str]]:
    """What each kernel's launch returned, then the faults that were reported of it."""
    program = toolchain.emulated(FAULTS, kind)
    run = toolchain.run(program, str(sm), *names, EMULATION_SCHEDULE=schedule)
    assert run.returncode == 0, run.stdout
    lines = [line for line in run.stdout.splitlines() if not line.startswith("emulation: ")]
    sections: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("== "):
            name, result = line[3:].split(": ")
            sections[name] = [result]
        else:
            sections[name].append(line)
    return sections


def assert_named(found: list[str], name: str, kind: str) -> None:
    """One fault is of that kind, and its report mentions the line."""
    line = re.escape(planted_line(name)) + r"\b"
    assert found[0] == "cudaErrorLaunchFailure"
    assert any(": %s: " % kind in report and re.search(line, report) for report in found[1:]), found


@pytest.mark.parametrize("schedule", ["seq", "rev", "rand:1", "rand:2", "rand:3"])
@pytest.mark.parametrize("kind", list(toolchain.KINDS))
def test_results(kind: str, schedule: str) -> None:
    program = toolchain.emulated(SOURCES / "results.cpp", kind)
    run = toolchain.run(program, EMULATION_SCHEDULE=schedule)
    assert (run.returncode, run.stdout) == (0, "0 failures\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "asan", "tsan"])
def test_results_with_clang(kind: str) -> None:
    compiler = toolchain.tool("clang++-19", "clang++")
    run = toolchain.run(toolchain.emulated(SOURCES / "results.cpp", kind, compiler=compiler))
    assert (run.returncode, run.stdout) == (0, "0 failures\n")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["seq", "rand:1"])
@pytest.mark.parametrize("kind", ["plain", "checked"])
def test_results_on_aarch64(kind: str, schedule: str) -> None:
    """The Jetsons' own instruction set, under qemu."""
    qemu = toolchain.tool("qemu-aarch64", "qemu-aarch64-static")
    compiler = toolchain.tool("aarch64-linux-gnu-g++")
    program = toolchain.emulated(SOURCES / "results.cpp", kind, compiler=compiler)
    run = toolchain.run(
        Path(qemu), "-L", "/usr/aarch64-linux-gnu", str(program), EMULATION_SCHEDULE=schedule
    )
    assert (run.returncode, run.stdout) == (0, "0 failures\n")


@pytest.mark.parametrize("kind", ["plain", "asan", "checked"])
def test_cuda_runtime(kind: str) -> None:
    run = toolchain.run(toolchain.emulated(SOURCES / "cudart.cpp", kind))
    assert run.returncode == 0 and run.stdout.endswith("\n0 failures\n"), run.stdout


@pytest.mark.parametrize("schedule", ["seq", "rev", "rand:1"])
@pytest.mark.parametrize("kind", ["plain", "checked"])
@pytest.mark.parametrize("name", STRUCTURE)
def test_fault_of_structure(name: str, kind: str, schedule: str) -> None:
    assert_named(reports(kind, schedule, 87, tuple(STRUCTURE))[name], name, STRUCTURE[name])


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_instruction_that_an_older_device_lacks(name: str) -> None:
    found = reports("plain", "seq", 72, UNSUPPORTED)[name]
    assert_named(found, name, "unsupported instruction")
    assert reports("plain", "seq", 80, UNSUPPORTED)[name] == ["cudaSuccess"]


@pytest.mark.parametrize("schedule", ["seq", "rev", "rand:1"])
@pytest.mark.parametrize("name", MEMORY)
def test_fault_of_memory(name: str, schedule: str) -> None:
    assert_named(reports("checked", schedule, 87, tuple(MEMORY))[name], name, MEMORY[name])


def test_fault_is_reported_again_after_a_reset() -> None:
    program = toolchain.emulated(FAULTS, "checked")
    run = toolchain.run(program, "87", "missing_barrier", "missing_barrier")
    assert run.stdout.count("== missing_barrier: cudaErrorLaunchFailure") == 2


@pytest.mark.parametrize("schedule", ["seq", "rev", "rand:1", "rand:2"])
@pytest.mark.parametrize("name", HARMLESS)
def test_no_false_alarm(name: str, schedule: str) -> None:
    assert reports("checked", schedule, 87, HARMLESS)[name] == ["cudaSuccess"]


@pytest.mark.parametrize("name", ADDRESS)
def test_address_and_undefined_behaviour_sanitizers(name: str) -> None:
    run = toolchain.run(toolchain.emulated(FAULTS, "asan"), "87", name)
    assert ADDRESS[name] in run.stdout
    assert planted_line(name) in run.stdout


@pytest.mark.parametrize("name", sorted(THREAD))
def test_thread_sanitizer(name: str) -> None:
    run = toolchain.run(toolchain.emulated(FAULTS, "tsan"), "87", name)
    assert "WARNING: ThreadSanitizer: data race" in run.stdout
    assert planted_line(name) in run.stdout


def test_every_planted_fault_is_expected_somewhere() -> None:
    listed = toolchain.run(toolchain.emulated(FAULTS, "plain")).stdout.split()
    assert set(listed) == {*STRUCTURE, *UNSUPPORTED, *MEMORY, *ADDRESS, *THREAD, *HARMLESS}


MISUSE = """
#include "common/portable.cuh"
using A = gpu::Arch<%d>;
__global__ void kernel(void* p, uint32_t* r, float* f, int* i) {
  gpu::cp_async<A>(p, p);
  gpu::cp_async_commit<A>();
  gpu::cp_async_wait<A>();
  gpu::ldmatrix_x4<A>(reinterpret_cast<uint32_t(&)[4]>(*r), p);
  gpu::mma_f16<A>(reinterpret_cast<float(&)[4]>(*f), reinterpret_cast<uint32_t(&)[4]>(*r),
                  reinterpret_cast<uint32_t(&)[2]>(*r), reinterpret_cast<float(&)[4]>(*f));
  gpu::mma_s8<A>(reinterpret_cast<int(&)[4]>(*i), reinterpret_cast<uint32_t(&)[4]>(*r),
                 reinterpret_cast<uint32_t(&)[2]>(*r), reinterpret_cast<int(&)[4]>(*i));
}
"""


@pytest.mark.parametrize(("sm", "refused"), [(72, 6), (80, 0)])
def test_kernel_for_an_older_architecture_cannot_use_newer_instructions(
    sm: int, refused: int, tmp_path: Path
) -> None:
    source = tmp_path / "misuse.cpp"
    source.write_text(MISUSE % sm)
    command = [*toolchain.base_flags(toolchain.tool("g++")), "-fsyntax-only", source]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert run.stderr.count("static assertion failed: this architecture has no") == refused
    assert (run.returncode == 0) == (refused == 0)


@pytest.mark.parametrize("kind", list(toolchain.KINDS))
def test_headers_may_be_in_several_sources_of_a_library(kind: str, tmp_path: Path) -> None:
    """As they are in the plugins' library: they define nothing that may be defined only once."""
    source, compiled = tmp_path / "source.cpp", tmp_path / "source.o"
    source.write_text('#include "common/storage.cuh"\n')
    command = [*toolchain.base_flags(toolchain.tool("g++")), *toolchain.KINDS[kind], "-c"]
    subprocess.run([*map(str, command), str(source), "-o", str(compiled)], check=True)
    listed = subprocess.run(["nm", "-C", compiled], capture_output=True, text=True, check=True)
    assert re.findall(r"^\w+ [A-TX-Z] .*", listed.stdout, re.MULTILINE) == []


def test_cost() -> None:
    """Nanoseconds of processor time; measured 24, 30, 50 and 2 on a quiet 2-core machine."""
    run = toolchain.run(toolchain.emulated(SOURCES / "bench.cpp", "plain", "-O2"))
    cost = dict(line.split() for line in run.stdout.splitlines()[:4])
    limits = {"thread": 150, "barrier": 200, "shuffle": 300, "load": 20}
    assert {k: float(v) for k, v in cost.items() if float(v) > limits[k]} == {}
    assert cost.keys() == limits.keys()
