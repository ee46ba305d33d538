"""Memory of the GPU and one stream on it: all that the TensorRT session asks of CUDA.

PyCUDA by default, cuda-python where PyCUDA is absent. An address is an int; copies and launches are
queued on the stream, and `synchronize` waits for them.
"""

from __future__ import annotations

import atexit
import ctypes
from typing import Any, Callable, List, Optional, Protocol, Sequence

import numpy as np

from ..errors import MissingRequirement
from .cuda_graph import DriverGraphs, Graph


class Device(Protocol):
    """stream: its handle. Everything that was allocated is freed by `close`."""

    stream: int

    def allocate(self, nbytes: int) -> int:
        """Device memory, set to zero."""

    def pinned(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Page-locked host memory, from which and to which copies do not block."""

    def to_device(self, address: int, array: np.ndarray) -> None: ...

    def to_host(self, array: np.ndarray, address: int) -> None: ...

    def synchronize(self) -> None: ...

    def capture(self, work: Callable[[], bool]) -> Optional[Graph]:
        """Record what `work` queues as a CUDA graph, which runs none of it. None, and nothing is
        queued, where work says False or graphs cannot be recorded."""

    def close(self) -> None:
        """Wait, and free everything; graphs before it. Done at the end of the process if not
        before: PyCUDA aborts one that leaves a context behind."""


def open_device() -> Device:
    """The first GPU; raises MissingRequirement without one, or without a package to reach it."""
    try:
        import pycuda.driver
    except ImportError:
        pass
    else:
        return PycudaDevice(pycuda.driver)
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise MissingRequirement(
            "neither PyCUDA nor cuda-python is installed: pip install 'edgepool[tensorrt]'"
        ) from error
    return CudaPythonDevice(runtime)


class PycudaDevice:
    """`Device` through pycuda.driver, in the GPU's primary context, which TensorRT uses too."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        try:
            cuda.init()
            self._context = cuda.Device(0).retain_primary_context()
        except cuda.Error as error:
            raise MissingRequirement("no GPU: CUDA says %s" % error) from error
        self._context.push()
        self._stream = cuda.Stream()
        self.stream = int(self._stream.handle)
        self._graphs = DriverGraphs()
        self._allocations: List[Any] = []
        atexit.register(self.close)

    def allocate(self, nbytes: int) -> int:
        try:
            memory = self._cuda.mem_alloc(max(1, nbytes))
        except self._cuda.MemoryError as error:
            raise too_little(nbytes) from error
        self._allocations.append(memory)
        self._cuda.memset_d8_async(int(memory), 0, max(1, nbytes), self._stream)
        return int(memory)

    def pinned(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        array: np.ndarray = self._cuda.pagelocked_empty(tuple(shape), dtype)
        return array

    def to_device(self, address: int, array: np.ndarray) -> None:
        self._cuda.memcpy_htod_async(address, array, self._stream)

    def to_host(self, array: np.ndarray, address: int) -> None:
        self._cuda.memcpy_dtoh_async(array, address, self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def capture(self, work: Callable[[], bool]) -> Optional[Graph]:
        return self._graphs.capture(self.stream, work)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._stream.synchronize()
        for memory in self._allocations:
            memory.free()
        self._allocations.clear()
        del self._stream  # while its context is there
        self._context.pop()
        self._context.detach()


class CudaPythonDevice:
    """`Device` through cuda.bindings.runtime, whose calls return (error, result...)."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        error, count = runtime.cudaGetDeviceCount()
        if error != runtime.cudaError_t.cudaSuccess or count == 0:
            raise MissingRequirement("no GPU: CUDA says %s" % getattr(error, "name", error))
        self._call(runtime.cudaSetDevice, 0)
        self.stream = int(self._call(runtime.cudaStreamCreate))
        self._allocations: List[int] = []
        self._pinned: List[int] = []
        atexit.register(self.close)

    def allocate(self, nbytes: int) -> int:
        error, address = self._runtime.cudaMalloc(max(1, nbytes))
        if error != self._runtime.cudaError_t.cudaSuccess:
            raise too_little(nbytes)
        self._allocations.append(int(address))
        self._call(self._runtime.cudaMemsetAsync, address, 0, max(1, nbytes), self.stream)
        return int(address)

    def pinned(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        address = int(self._call(self._runtime.cudaMallocHost, max(1, count)))
        self._pinned.append(address)
        memory = (ctypes.c_byte * count).from_address(address)
        return np.frombuffer(memory, dtype).reshape(tuple(shape))

    def to_device(self, address: int, array: np.ndarray) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._copy(address, array.ctypes.data, array.nbytes, kind)

    def to_host(self, array: np.ndarray, address: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._copy(array.ctypes.data, address, array.nbytes, kind)

    def _copy(self, to: int, source: int, nbytes: int, kind: Any) -> None:
        self._call(self._runtime.cudaMemcpyAsync, to, source, nbytes, kind, self.stream)

    def synchronize(self) -> None:
        self._call(self._runtime.cudaStreamSynchronize, self.stream)

    def capture(self, work: Callable[[], bool]) -> Optional[Graph]:
        cuda = self._runtime
        done, ok = False, cuda.cudaError_t.cudaSuccess
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call(cuda.cudaStreamBeginCapture, self.stream, mode)
        try:
            done = work()
        finally:
            error, graph = cuda.cudaStreamEndCapture(self.stream)
        if error != ok:
            return None
        if done:
            error, executable = cuda.cudaGraphInstantiate(graph, 0)
            done = error == ok
        self._call(cuda.cudaGraphDestroy, graph)
        if not done:
            return None
        return Graph(
            launch=lambda: self._call(cuda.cudaGraphLaunch, executable, self.stream),
            close=lambda: self._call(cuda.cudaGraphExecDestroy, executable),
        )

    def close(self) -> None:
        atexit.unregister(self.close)
        self.synchronize()
        for address in self._pinned:
            self._call(self._runtime.cudaFreeHost, address)
        for address in self._allocations:
            self._call(self._runtime.cudaFree, address)
        self._call(self._runtime.cudaStreamDestroy, self.stream)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        error, *results = function(*arguments)
        if error != self._runtime.cudaError_t.cudaSuccess:
            raise MissingRequirement("CUDA: %s failed: %s" % (function.__name__, error.name))
        return results[0] if results else None


def too_little(nbytes: int) -> MissingRequirement:
    return MissingRequirement(
        "the GPU has no %.1f MiB left: close other programs, or build the engine for fewer "
        "--max-kv-tokens" % (nbytes / (1 << 20))
    )
