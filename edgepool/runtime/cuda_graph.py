"""CUDA graphs through the driver's own library, for PyCUDA, which has none.

What is queued on a stream while it is captured becomes a graph (CUDA driver API, "Stream
Management" and "Graph Management"; all of it is there from CUDA 11.4 on, JetPack 5's).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Callable, Optional

from ..errors import MissingRequirement

THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may go on using CUDA


@dataclass(frozen=True)
class Graph:
    """launch queues what was recorded; close frees it."""

    launch: Callable[[], None]
    close: Callable[[], None]


class DriverGraphs:
    """Records graphs on streams of the current context."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        """Raises OSError without a driver."""
        self._cuda: Any = ctypes.CDLL(library)

    def capture(self, stream: int, work: Callable[[], bool]) -> Optional[Graph]:
        """Record what `work` queues; None where it says False or the driver could not record it.

        Nothing of it has run then, and the stream is as it was.
        """
        handle = ctypes.c_void_p(stream)
        if self._cuda.cuStreamBeginCapture_v2(handle, THREAD_LOCAL):
            return None
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        done = False
        try:
            done = work()
        finally:
            failed = self._cuda.cuStreamEndCapture(handle, ctypes.byref(graph))
        if failed or not graph:
            return None
        if done:
            flags = ctypes.c_ulonglong(0)
            made = self._cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, flags)
            done = made == 0
        self._call("cuGraphDestroy", graph)
        if not done:
            return None
        return Graph(
            launch=lambda: self._call("cuGraphLaunch", executable, handle),
            close=lambda: self._call("cuGraphExecDestroy", executable),
        )

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._cuda, name)(*arguments)
        if error:
            raise MissingRequirement("CUDA: %s failed: error %d of cuda.h" % (name, error))
