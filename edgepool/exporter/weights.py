"""Weights on their way to disk: read, transposed, cast and written one at a time."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import torch
from torch import Tensor

from ..errors import BadInput
from ..onnxfile import GRAPH_INITIALIZER, MODEL_GRAPH, TENSOR_RAW_DATA, external_reference, header
from ..progress import Report, silent
from .simplify import Skeleton

# A protobuf message ends at 2 GiB; above this, weights go to a file of their own.
EXTERNAL_OVER = 1_500_000_000
# Where a tensor begins in that file: pages, so that a reader can map it.
ALIGNMENT = 4096

MADV_PAGEOUT = 21  # linux/mman.h, since Linux 5.4
FICLONE = 0x40049409  # linux/fs.h, ioctl_ficlone(2)

TORCH_DTYPES = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT8: torch.int8,
    onnx.TensorProto.BOOL: torch.bool,
}


@dataclass(frozen=True)
class Weight:
    """An initialiser to be written: shape and dtype as the graph has it.

    source is the checkpoint's tensor; transposed says that the graph wants it as [in, out].
    """

    name: str
    shape: tuple[int, ...]
    dtype: int
    source: Tensor
    transposed: bool

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * TORCH_DTYPES[self.dtype].itemsize

    def read(self) -> memoryview:
        """The bytes to write. Raises BadInput for a value that the dtype cannot hold."""
        tensor = self.source.t() if self.transposed else self.source
        tensor = tensor.detach().to(TORCH_DTYPES[self.dtype]).contiguous()
        # the extremes tell without the temporaries of isfinite, which take twice the tensor
        if tensor.dtype == torch.float16 and not all(x.isfinite() for x in torch.aminmax(tensor)):
            raise BadInput(
                f"tensor '{self.name}' has values beyond float16: export with --dtype fp32"
            )
        return memoryview(tensor.reshape(-1).numpy()).cast("B")


def weights_of(skeleton: Skeleton, tensors: Mapping[str, Tensor]) -> list[Weight]:
    """The initialisers of a skeleton, with the tensors they come from, by name."""
    return [
        Weight(
            name=value.name,
            shape=tuple(int(size) for size in value.shape),
            dtype=int(value.dtype),
            source=tensors[value.name],
            transposed=value.name in skeleton.transposed,
        )
        for value in skeleton.weights
    ]


def write_model(
    model: onnx.ModelProto,
    weights: Sequence[Weight],
    path: Path,
    report: Report = silent,
    twin: Path | None = None,
) -> None:
    """Write `model`, whose weights are graph inputs, with `weights` as initialisers.

    The file is put together field by field, so that no more than one tensor is in memory. Weights
    of more than EXTERNAL_OVER bytes go to `<name>.data` beside the file; where `twin`, a model with
    the same weights, has that file already, it is copied.
    """
    model = without_weights(model, [weight.name for weight in weights])
    total = sum(weight.nbytes for weight in weights)
    data = data_of(path) if total > EXTERNAL_OVER else None
    entries, offset = [], 0
    for weight in weights:
        head = onnx.TensorProto(dims=weight.shape, data_type=weight.dtype, name=weight.name)
        if data is not None:
            entry = head.SerializeToString() + external_reference(data.name, offset, weight.nbytes)
            offset = _aligned(offset + weight.nbytes)
            entries.append(entry)
        else:
            entries.append(head.SerializeToString() + header(TENSOR_RAW_DATA, weight.nbytes))
    graph = model.graph.SerializeToString(deterministic=True)
    model.ClearField("graph")
    inline = [0 if data is not None else weight.nbytes for weight in weights]
    lengths = [len(entry) + raw for entry, raw in zip(entries, inline)]
    heads = [header(GRAPH_INITIALIZER, length) for length in lengths]
    size = len(graph) + sum(map(len, heads)) + sum(lengths)
    with path.open("wb") as file:
        file.write(model.SerializeToString(deterministic=True))
        file.write(header(MODEL_GRAPH, size))
        file.write(graph)
        for i, (weight, head, entry) in enumerate(zip(weights, heads, entries)):
            file.write(head)
            file.write(entry)
            if data is None:
                _write(file, weight)
                report("writing weights", i + 1, len(weights))
    if data is not None and twin is not None:
        _copy(data_of(twin), data)
    elif data is not None:
        with data.open("wb") as file:
            for i, weight in enumerate(weights):
                file.seek(_aligned(file.tell()))
                _write(file, weight)
                report("writing weights", i + 1, len(weights))


def data_of(path: Path) -> Path:
    """The file beside a model that holds its weights."""
    return path.with_name(path.name + ".data")


def without_weights(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy of the model without the graph inputs that stand for weights."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    weights = set(names)
    inputs = [value for value in model.graph.input if value.name not in weights]
    del copy.graph.input[:]
    copy.graph.input.extend(inputs)
    return copy


def _copy(source: Path, target: Path) -> None:
    """A copy that shares the source's blocks on the disk where the file system can (btrfs, XFS).

    Not a hard link: the onnx package takes external data that has two names for an attack.
    """
    with source.open("rb") as read, target.open("wb") as written:
        try:
            fcntl.ioctl(written.fileno(), FICLONE, read.fileno())
        except OSError:
            shutil.copyfileobj(read, written, 1 << 22)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _write(file: BinaryIO, weight: Weight) -> None:
    file.write(weight.read())
    release(weight.source)


def release(tensor: Tensor) -> None:
    """Let the kernel take back the pages of a tensor that is mapped from a file.

    Without this, a checkpoint that was read once counts as memory in use. It loses nothing: pages
    are read again when they are needed, and memory that no file backs stays (MADV_PAGEOUT).
    """
    storage = tensor.untyped_storage()
    begin = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = storage.data_ptr() + storage.nbytes() - begin
    if sys.platform == "linux" and length > 0:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_PAGEOUT)
