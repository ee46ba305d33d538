"""A real GPU: is there one, the kernels compiled for it, its memory, and time on it.

`Library` stands in for tests.plugins.emulated.Library, so that the kernels' own tests can drive
either.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.plugins import emulated, toolchain

MAJOR, MINOR, MULTIPROCESSORS = 75, 76, 16  # CUdevice_attribute
ON_DEVICE = 3  # cudaMemcpyDeviceToDevice


def attribute(which: int) -> int:
    """An attribute of the first GPU; skips the test if there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        # These tests are for a GPU; scripts/gpu_check.sh counts and shows what was skipped.
        pytest.skip("no GPU: this machine has no driver (libcuda.so.1)")
    status, count, device, value = cuda.cuInit(0), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if status or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        # As above: a driver without a GPU.
        pytest.skip("no GPU: the driver finds none (cuInit says %d)" % status)
    assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device) == 0
    return value.value


def compute_capability() -> int:
    """Of the first GPU, such as 87; skips the test if there is none."""
    return 10 * attribute(MAJOR) + attribute(MINOR)


def compiled(name: str, sm: int) -> Path:
    """The library of tests/plugins/<name>_entry.cpp for that architecture."""
    source = Path(emulated.__file__).with_name(name + "_entry.cpp")
    command = [
        toolchain.tool("nvcc"), "-x", "cu", "-std=c++17", "-O3", "-I", toolchain.PLUGINS,
        "-arch=sm_%d" % sm, "-DGPU_ONLY_ARCH=%d" % (80 if sm >= 80 else 72),
        "-Xcompiler=-fPIC", "-shared", "-cudart=shared", source,
    ]  # fmt: skip
    return toolchain.compile_once(name + "-gpu.so", command, toolchain.with_includes(source))


class Library:
    """A library of kernels for this GPU; its functions and libcudart's as attributes of `c`."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.c.cudaMalloc.argtypes = [ctypes.POINTER(pointer), size]
        self.c.cudaFree.argtypes = [pointer]
        self.c.cudaMemcpy.argtypes = [pointer, pointer, size, ctypes.c_int]
        self.c.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
        self.c.cudaMemset.argtypes = [pointer, ctypes.c_int, size]
        self.c.cudaEventRecord.argtypes = [pointer, pointer]
        self.c.cudaEventElapsedTime.argtypes = [ctypes.POINTER(ctypes.c_float), pointer, pointer]
        for name in ("cudaEventSynchronize", "cudaEventDestroy"):
            getattr(self.c, name).argtypes = [pointer]
        self.c.cudaGetErrorName.restype = ctypes.c_char_p
        for name in ("workspace_bytes", "problem"):
            if hasattr(self.c, name):
                getattr(self.c, name).restype = (
                    size if name == "workspace_bytes" else ctypes.c_char_p
                )

    def imitate(self, sm: int, schedule: str = "seq") -> None:
        """A GPU is what it is."""

    def reset(self) -> None:
        """Forgets the last error."""
        self.c.cudaGetLastError()

    def faults(self) -> list[str]:
        """What went wrong in the launches so far."""
        error = self.c.cudaDeviceSynchronize() or self.c.cudaGetLastError()
        return [self.c.cudaGetErrorName(error).decode()] if error else []

    @contextmanager
    def memory(self) -> Iterator[emulated.Memory]:
        """Device arrays that are given back at the end."""
        memory = emulated.Memory(self)  # type: ignore[arg-type]
        try:
            yield memory
        finally:
            memory.release()

    def seconds(self, launch: Callable[[], int], times: int = 21) -> float:
        """The median time of a launch, on the default stream, after some to warm up."""
        start, end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (start, end):
            assert self.c.cudaEventCreate(ctypes.byref(event)) == 0
        took, elapsed = [], ctypes.c_float()
        for i in range(times + 3):
            self.c.cudaEventRecord(start, None)
            assert launch() == 0
            self.c.cudaEventRecord(end, None)
            assert self.c.cudaEventSynchronize(end) == 0
            assert self.c.cudaEventElapsedTime(ctypes.byref(elapsed), start, end) == 0
            took += [elapsed.value / 1e3] if i >= 3 else []
        for event in (start, end):
            self.c.cudaEventDestroy(event)
        return statistics.median(took)

    def copy_bandwidth(self, size: int = 1 << 29) -> float:
        """Bytes a second, read and written, of a copy of `size` bytes within the device."""
        with self.memory() as memory:
            source, target = memory.allocate(size), memory.allocate(size)
            return (
                2
                * size
                / self.seconds(
                    lambda: self.c.cudaMemcpyAsync(target, source, size, ON_DEVICE, None)
                )
            )
