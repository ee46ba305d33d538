"""Call kernels that were compiled for the CPU emulation from Python, with numpy arrays.

An entry source (tests/plugins/<op>_entry.cpp) includes a kernel and exports, as C functions, its
`launch` and what else a test asks of it. Arguments go through a ctypes structure that mirrors the
kernel's `Params`; arrays live in the emulation's device memory, so that its checks know them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins import toolchain

# The build that `load` takes: the slow tests run the fast ones again under other builds.
KIND = os.environ.get("EDGEPOOL_EMULATED_KIND", "plain")
HERE = Path(__file__).parent
TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.int8): 2}  # edgepool::Type
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind
# A thousand random cases, and of them fifty for the fast tests.
SEEDS = [range(50), pytest.param(range(50, 1000), marks=pytest.mark.slow)]
TWENTY = tuple("rand:%d" % seed for seed in range(20))  # schedules


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
        address = self.allocate(array.nbytes)
        self.write(address, array)
        return address

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy the array to an address within what was allocated."""
        array = np.ascontiguousarray(array)
        assert self._c.cudaMemcpy(address, array.ctypes.data, array.nbytes, TO_DEVICE) == 0

    def get(self, address: int, like: np.ndarray) -> np.ndarray:
        """The array at an address, with the shape and type of `like`."""
        array = np.empty(like.shape, like.dtype)
        assert self._c.cudaMemcpy(array.ctypes.data, address, array.nbytes, TO_HOST) == 0
        return array

    def release(self) -> None:
        for address in self._arrays:
            self._c.cudaFree(address)
        self._arrays.clear()


def load(name: str, kind: str = KIND) -> Library:
    """The library of tests/plugins/<name>_entry.cpp; `kind` as in toolchain.KINDS."""
    source = HERE / (name + "_entry.cpp")
    return Library(toolchain.emulated(source, kind, library=True))


def variant(
    name: str,
    kernel: str,
    *changes: tuple[str, str],
    kind: str = "plain",
    flags: Sequence[str] = (),
) -> Library:
    """The same of a copy of plugins/<kernel>/ in which pieces of text are replaced.

    Each piece must occur exactly once in the folder. `flags` go to the compiler.
    """
    texts = {p.name: p.read_text() for p in sorted((toolchain.PLUGINS / kernel).glob("*.cuh"))}
    for old, new in changes:
        holders = [n for n, text in texts.items() for _ in range(text.count(old))]
        assert len(holders) == 1, "%r is in %s" % (old, holders or "no file")
        texts[holders[0]] = texts[holders[0]].replace(old, new)
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    folder = toolchain.BUILD / "variants" / digest
    (folder / kernel).mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        _write(folder / kernel / file, text)
    # An include in quotes is looked for beside the including file first.
    entry = folder / (name + "_entry.cpp")
    _write(entry, (HERE / entry.name).read_text())
    return Library(toolchain.emulated(entry, kind, *flags, library=True))


def _write(path: Path, text: str) -> None:
    """Replace a file at once, since other test processes may read it."""
    staged = path.with_name("%s.%d" % (path.name, os.getpid()))
    staged.write_text(text)
    staged.replace(path)


def structure(fields: Sequence[tuple[str, Any]], values: dict[str, Any]) -> ctypes.Structure:
    """A ctypes structure with those fields, in order; all must be given."""
    record = type("Params", (ctypes.Structure,), {"_fields_": list(fields)})
    assert {name for name, _ in fields} == set(values), {n for n, _ in fields} ^ set(values)
    return record(**values)  # type: ignore[no-any-return]


def run_tests(file: str, kind: str, choice: str = "", marked: str = "not slow") -> None:
    """Run tests of a file again, in a process of its own, with builds of `kind`.

    `choice` and `marked` are pytest's -k and -m. AddressSanitizer's library must be the first of a
    process.
    """
    environment = {**os.environ, "EDGEPOOL_EMULATED_KIND": kind}
    if kind == "asan":
        compiler = toolchain.tool("g++")
        command = [compiler, "-print-file-name=libasan.so"]
        library = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        environment.update(LD_PRELOAD=library.strip(), ASAN_OPTIONS="detect_leaks=0")
    arguments = ["-q", "-p", "no:cacheprovider", "-m", marked, "-k", choice, file]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=toolchain.ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if run.returncode:
        pytest.fail(run.stdout[-4000:] + run.stderr[-4000:], pytrace=False)
