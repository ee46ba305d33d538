"""The GPU of this machine, asked of the driver: no CUDA toolkit and no package is needed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Optional

MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*, cuda.h


@dataclass(frozen=True)
class Gpu:
    """name as the driver says it; sm: 87 for compute capability 8.7; driver: its CUDA version."""

    name: str
    sm: int
    memory: int
    driver: str


def find(library: str = "libcuda.so.1") -> Optional[Gpu]:
    """The first GPU, or None without a driver or a GPU."""
    try:
        cuda: Any = ctypes.CDLL(library)
    except OSError:
        return None
    count, device = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    name = ctypes.create_string_buffer(128)
    major, minor, driver = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    memory = ctypes.c_size_t()
    failed = (
        cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetName(name, len(name), device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        or cuda.cuDriverGetVersion(ctypes.byref(driver))
    )
    if failed:
        return None
    version = "%d.%d" % (driver.value // 1000, driver.value % 1000 // 10)
    sm = major.value * 10 + minor.value
    return Gpu(name.value.decode("utf-8", "replace"), sm, memory.value, version)
