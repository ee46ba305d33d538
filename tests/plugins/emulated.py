"""Call kernels that were compiled for the CPU emulation from Python, with numpy arrays.

An entry source (tests/plugins/<op>_entry.cpp) includes a kernel and exports, as C functions, its
`launch` and what else a test asks of it. Arguments go through a ctypes structure that mirrors the
kernel's `Params`; arrays live in the emulation's device memory, so that its checks know them.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.plugins import toolchain

HERE = Path(__file__).parent
TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.int8): 2}  # edgepool::Type
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


class Library:
    """An emulated library: its functions as attributes of `c`, device arrays, counters, faults."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        self.c.emulation_fault.restype = ctypes.c_char_p
        self.c.emulation_counter.restype = ctypes.c_uint64
        self.c.emulation_set_block_sampling.argtypes = [ctypes.c_uint64]
        self.c.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
        self.c.cudaFree.argtypes = [ctypes.c_void_p]
        self.c.cudaMemcpy.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
        ]  # fmt: skip

    def imitate(self, sm: int, schedule: str = "seq") -> None:
        """Run what follows as on a device of compute capability `sm`, in that thread order."""
        assert self.c.emulation_set_architecture(sm) == 0
        assert self.c.emulation_set_schedule(schedule.encode()) == 0

    def sample(self, every: int) -> None:
        """Execute one block in `every`."""
        self.c.emulation_set_block_sampling(every)

    def reset(self) -> None:
        self.c.emulation_reset()

    def counter(self, name: str) -> int:
        return int(self.c.emulation_counter(name.encode()))

    def bytes_moved(self) -> int:
        """Bytes that kernels read and wrote in global memory since the last reset."""
        return sum(map(self.counter, ("load_bytes", "store_bytes", "atomic_bytes")))

    def faults(self) -> list[str]:
        return [self.c.emulation_fault(i).decode() for i in range(self.c.emulation_fault_count())]

    @contextmanager
    def memory(self) -> Iterator[Memory]:
        """Device arrays that are given back at the end."""
        memory = Memory(self)
        try:
            yield memory
        finally:
            memory.release()


class Memory:
    """Device arrays of one call."""

    def __init__(self, library: Library) -> None:
        self._c = library.c
        self._arrays: list[ctypes.c_void_p] = []

    def allocate(self, size: int) -> int:
        """Address of `size` bytes, which the emulation fills with 0xFF."""
        address = ctypes.c_void_p()
        assert self._c.cudaMalloc(ctypes.byref(address), size) == 0
        self._arrays.append(address)
        return int(address.value or 0)

    def put(self, array: np.ndarray) -> int:
        """Address of a copy of the array."""
        array = np.ascontiguousarray(array)
        address = self.allocate(array.nbytes)
        assert self._c.cudaMemcpy(address, array.ctypes.data, array.nbytes, TO_DEVICE) == 0
        return address

    def get(self, address: int, like: np.ndarray) -> np.ndarray:
        """The array at an address, with the shape and type of `like`."""
        array = np.empty(like.shape, like.dtype)
        assert self._c.cudaMemcpy(array.ctypes.data, address, array.nbytes, TO_HOST) == 0
        return array

    def release(self) -> None:
        for address in self._arrays:
            self._c.cudaFree(address)
        self._arrays.clear()


def load(name: str, kind: str = "plain", *flags: str) -> Library:
    """The library of tests/plugins/<name>_entry.cpp; `kind` as in toolchain.KINDS."""
    source = HERE / (name + "_entry.cpp")
    return Library(toolchain.emulated(source, kind, *flags, library=True))


def mutant(name: str, kernel: str, old: str, new: str, kind: str = "plain") -> Library:
    """The same with one piece of text of plugins/<kernel> replaced; it must occur exactly once."""
    text = (toolchain.PLUGINS / kernel).read_text()
    assert text.count(old) == 1, "%r occurs %d times in %s" % (old, text.count(old), kernel)
    text = text.replace(old, new).replace("#pragma once", "")
    entry = (HERE / (name + "_entry.cpp")).read_text()
    merged = re.sub(r'#include "%s"\n' % re.escape(kernel), lambda _: text, entry)
    assert merged != entry
    digest = hashlib.sha256(merged.encode()).hexdigest()[:12]
    source = toolchain.BUILD / ("%s-%s.cpp" % (name, digest))
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(merged)
    return Library(toolchain.emulated(source, kind, library=True))


def structure(fields: Sequence[tuple[str, Any]], values: dict[str, Any]) -> ctypes.Structure:
    """A ctypes structure with those fields, in order; all must be given."""
    record = type("Params", (ctypes.Structure,), {"_fields_": list(fields)})
    assert {name for name, _ in fields} == set(values), {n for n, _ in fields} ^ set(values)
    return record(**values)  # type: ignore[no-any-return]
