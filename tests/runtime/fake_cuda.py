"""A GPU imitated below the packages that reach it: PyCUDA, cuda-python, and libcuda for graphs.

Device memory is host memory, and everything queued on a stream happens when it is synchronised, or
not at all, so that a buffer that is reused too early shows up as wrong numbers. Copies have to stay
inside of what was allocated, and go to and from page-locked memory; what is freed is gone.
"""

from __future__ import annotations

import ctypes
import enum
import weakref
from types import SimpleNamespace
from typing import Any, Callable

import numpy as np

Operation = Callable[[], None]


class Gpu:
    """graphs: whether it records them; room: bytes that can be allocated."""

    def __init__(self, graphs: bool = True, room: int = 1 << 40) -> None:
        self.graphs, self.room = graphs, room
        self.memory: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.streams: set[int] = set()
        self.recorded: dict[int, list[Operation]] = {}  # graphs and executables
        self.contexts = 0
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # engines, which have to go first
        self.queue: list[Operation] = []
        self.capturing: list[Operation] | None = None
        self.launches = 0
        self.fetched = 0  # copies to the host
        self._handles = iter(range(77, 1 << 30))

    def stream(self) -> int:
        handle = next(self._handles)
        self.streams.add(handle)
        return handle

    def end_stream(self, stream: int) -> None:
        assert not self.users, "an engine is still there"
        self.streams.remove(stream)

    def allocate(self, nbytes: int) -> int | None:
        """Memory full of garbage, as real memory may be; None where there is too little."""
        assert nbytes > 0
        if nbytes + sum(array.nbytes for array in self.memory.values()) > self.room:
            return None
        array = np.full(nbytes, 0xA5, np.uint8)
        self.memory[array.ctypes.data] = array
        return array.ctypes.data

    def pin(self, nbytes: int) -> int:
        array = np.full(nbytes, 0xA5, np.uint8)
        self.pinned[array.ctypes.data] = array
        return array.ctypes.data

    def submit(self, stream: int, operation: Operation) -> None:
        assert stream in self.streams
        (self.queue if self.capturing is None else self.capturing).append(operation)

    def set(self, address: int, value: int, nbytes: int, stream: int) -> None:
        assert nbytes <= self.memory[address].nbytes
        self.submit(stream, lambda: self.memory[address][:nbytes].fill(value))

    def copy(self, to: int, source: int, nbytes: int, host: int, stream: int) -> None:
        """host: which of the two addresses is the host's."""
        device = source if host == to else to
        assert nbytes <= self.memory[device].nbytes
        assert any(a <= host and host + nbytes <= a + x.nbytes for a, x in self.pinned.items())
        self.fetched += host == to
        self.submit(stream, lambda: ctypes.memmove(to, source, nbytes))

    def synchronize(self, stream: int) -> None:
        assert stream in self.streams
        assert self.capturing is None
        queued, self.queue = self.queue, []
        for operation in queued:
            operation()

    def begin(self, stream: int) -> bool:
        assert stream in self.streams
        if self.graphs:
            self.capturing = []
        return self.graphs

    def end(self) -> int:
        assert self.capturing is not None
        handle = next(self._handles)
        self.recorded[handle], self.capturing = self.capturing, None
        return handle

    def instantiate(self, graph: int) -> int:
        handle = next(self._handles)
        self.recorded[handle] = list(self.recorded[graph])
        return handle

    def launch(self, executable: int, stream: int) -> None:
        assert stream in self.streams
        self.launches += 1
        self.queue += self.recorded[executable]

    @property
    def is_clean(self) -> bool:
        """Whether everything was given back."""
        left = (self.memory, self.pinned, self.streams, self.recorded, self.contexts)
        return not any(left) and self.capturing is None


def fake_pycuda(gpu: Gpu) -> Any:
    """`pycuda.driver`, as its documentation has it. Its page-locked arrays free themselves."""

    class CudaError(Exception):
        pass

    class CudaMemoryError(CudaError):
        pass

    class Context:
        def push(self) -> None:
            gpu.contexts += 1

        def pop(self) -> None:
            gpu.contexts -= 1

        def detach(self) -> None:
            assert gpu.contexts == 0
            gpu.pinned.clear()

    class Device:
        def __init__(self, number: int) -> None:
            assert number == 0

        def retain_primary_context(self) -> Context:
            return Context()

    class Stream:
        def __init__(self) -> None:
            assert gpu.contexts == 1
            self.handle = gpu.stream()

        def synchronize(self) -> None:
            gpu.synchronize(self.handle)

        def __del__(self) -> None:
            assert gpu.contexts == 1
            gpu.end_stream(self.handle)

    class Allocation:
        def __init__(self, address: int) -> None:
            self._address = address

        def __int__(self) -> int:
            return self._address

        def free(self) -> None:
            del gpu.memory[self._address]

    def mem_alloc(bytes: int) -> Allocation:
        address = gpu.allocate(bytes)
        if address is None:
            raise CudaMemoryError("cuMemAlloc failed: out of memory")
        return Allocation(address)

    def memset_d8_async(dest: int, data: int, count: int, stream: Stream) -> None:
        gpu.set(dest, data, count, stream.handle)

    def pagelocked_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        count = int(np.prod(shape))
        address = gpu.pin(count * np.dtype(dtype).itemsize)
        return gpu.pinned[address].view(dtype).reshape(shape)

    def memcpy_htod_async(dest: int, src: np.ndarray, stream: Stream) -> None:
        gpu.copy(dest, src.ctypes.data, src.nbytes, src.ctypes.data, stream.handle)

    def memcpy_dtoh_async(dest: np.ndarray, src: int, stream: Stream) -> None:
        gpu.copy(dest.ctypes.data, src, dest.nbytes, dest.ctypes.data, stream.handle)

    return SimpleNamespace(
        Error=CudaError, MemoryError=CudaMemoryError, init=lambda: None, Device=Device,
        Stream=Stream, mem_alloc=mem_alloc, memset_d8_async=memset_d8_async,
        pagelocked_empty=pagelocked_empty, memcpy_htod_async=memcpy_htod_async,
        memcpy_dtoh_async=memcpy_dtoh_async,
    )  # fmt: skip


def fake_libcuda(gpu: Gpu) -> Any:
    """The functions of libcuda that graphs take; 900 is CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED."""

    def cuStreamBeginCapture_v2(stream: Any, mode: int) -> int:
        assert mode == 1
        return 0 if gpu.begin(stream.value) else 900

    def cuStreamEndCapture(stream: Any, graph: Any) -> int:
        graph._obj.value = gpu.end()
        return 0

    def cuGraphInstantiateWithFlags(executable: Any, graph: Any, flags: Any) -> int:
        executable._obj.value = gpu.instantiate(graph.value)
        return 0

    def cuGraphLaunch(executable: Any, stream: Any) -> int:
        gpu.launch(executable.value, stream.value)
        return 0

    def destroy(handle: Any) -> int:
        del gpu.recorded[handle.value]
        return 0

    return SimpleNamespace(
        cuStreamBeginCapture_v2=cuStreamBeginCapture_v2, cuStreamEndCapture=cuStreamEndCapture,
        cuGraphInstantiateWithFlags=cuGraphInstantiateWithFlags, cuGraphLaunch=cuGraphLaunch,
        cuGraphDestroy=destroy, cuGraphExecDestroy=destroy,
    )  # fmt: skip


class cudaError_t(enum.Enum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorStreamCaptureUnsupported = 900


OK = cudaError_t.cudaSuccess


class FakeRuntime:
    """`cuda.bindings.runtime`; a test holds the parameters of its methods to the real ones."""

    cudaError_t = cudaError_t
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def cudaGetDeviceCount(self) -> Any:
        return OK, 1

    def cudaSetDevice(self, device: int) -> Any:
        return (OK,)

    def cudaStreamCreate(self) -> Any:
        return OK, self._gpu.stream()

    def cudaMalloc(self, size: int) -> Any:
        address = self._gpu.allocate(size)
        return (cudaError_t.cudaErrorMemoryAllocation if address is None else OK), address

    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: int) -> Any:
        self._gpu.set(devPtr, value, count, stream)
        return (OK,)

    def cudaMallocHost(self, size: int) -> Any:
        return OK, self._gpu.pin(size)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: int, stream: int) -> Any:
        self._gpu.copy(dst, src, count, src if kind == 1 else dst, stream)
        return (OK,)

    def cudaStreamSynchronize(self, stream: int) -> Any:
        self._gpu.synchronize(stream)
        return (OK,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> Any:
        assert mode == 1
        self._gpu.begin(stream)
        return (OK,)

    def cudaStreamEndCapture(self, stream: int) -> Any:
        if not self._gpu.graphs:
            return cudaError_t.cudaErrorStreamCaptureUnsupported, None
        return OK, self._gpu.end()

    def cudaGraphInstantiate(self, graph: int, flags: int) -> Any:
        return OK, self._gpu.instantiate(graph)

    def cudaGraphLaunch(self, graphExec: int, stream: int) -> Any:
        self._gpu.launch(graphExec, stream)
        return (OK,)

    def cudaGraphDestroy(self, graph: int) -> Any:
        del self._gpu.recorded[graph]
        return (OK,)

    def cudaGraphExecDestroy(self, graphExec: int) -> Any:
        del self._gpu.recorded[graphExec]
        return (OK,)

    def cudaFreeHost(self, ptr: int) -> Any:
        del self._gpu.pinned[ptr]
        return (OK,)

    def cudaFree(self, devPtr: int) -> Any:
        del self._gpu.memory[devPtr]
        return (OK,)

    def cudaStreamDestroy(self, stream: int) -> Any:
        self._gpu.end_stream(stream)
        return (OK,)
