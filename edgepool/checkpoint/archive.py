"""Write a `torch.save` archive one tensor at a time.

`torch.save` wants every tensor in memory at once. Here it writes the archive with holes
(`torch.serialization.skip_data`) into a list, and the holes are filled from `LazyTensor.read` while
the file is written front to back, so the peak is the largest tensor.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Callable, Union, cast

import torch
from torch import Tensor

from ..files import new_file
from .weights import LazyTensor, Weight, check_finite

DESCRIPTOR = b"PK\x07\x08"  # after a record's data: signature, CRC-32, sizes
ENTRY = b"PK\x01\x02"  # one per record in the central directory at the end

Report = Callable[[str, int, int], None]


def write_archive(
    path: Path,
    record: Mapping[str, Any],
    weights: Mapping[str, Weight],
    origin: object,
    report: Report,
) -> None:
    """Write `torch.save({**record, "state_dict": weights})` to `path`, replacing it at the end.

    Equal input gives equal bytes. Raises BadInput, leaving `path` as it was, when the file cannot
    be written or a weight (from `origin`) is not finite.
    """
    pieces = _layout({**record, "state_dict": _placeholders(weights)})
    with new_file(path) as stream:
        checksums: list[int] = []
        remaining = iter(weights.items())
        for piece in pieces:
            if isinstance(piece, bytes):
                stream.write(_with_checksums(piece, checksums))
                continue
            name, weight = next(remaining)
            tensor = weight.read() if isinstance(weight, LazyTensor) else weight
            check_finite(origin, name, tensor)
            data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            checksums.append(zlib.crc32(data))
            stream.write(data)
            report("writing tensors", len(checksums), len(weights))


def _placeholders(weights: Mapping[str, Weight]) -> dict[str, Tensor]:
    """Tensors of the same shapes and dtypes whose memory is never touched."""
    return {name: torch.empty(tuple(w.shape), dtype=w.dtype) for name, w in weights.items()}


class _Layout:
    """Takes the place of the file: bytes as they come, and an int for each run left out."""

    def __init__(self) -> None:
        self.pieces: list[Union[bytes, int]] = []

    def write(self, data: bytes) -> int:
        if self.pieces and isinstance(self.pieces[-1], bytes):
            self.pieces[-1] += bytes(data)
        else:
            self.pieces.append(bytes(data))
        return len(data)

    def seek(self, offset: int, whence: int) -> None:
        assert whence == os.SEEK_CUR
        self.pieces.append(offset)

    def flush(self) -> None:
        pass


def _layout(value: Any) -> list[Union[bytes, int]]:
    layout = _Layout()
    with torch.serialization.skip_data():
        torch.save(value, cast(BinaryIO, layout))
    return layout.pieces


def _with_checksums(piece: bytes, checksums: list[int]) -> bytes:
    """Fill in the CRC-32 that follows each tensor, and the copies in the central directory."""
    data = bytearray(piece)
    if checksums:
        assert piece.startswith(DESCRIPTOR)
        struct.pack_into("<I", data, 4, checksums[-1])
    tensors = iter(checksums)
    entry = piece.find(ENTRY)
    while entry >= 0 and piece.startswith(ENTRY, entry):
        name_size, extra_size, comment_size = struct.unpack_from("<HHH", piece, entry + 28)
        if b"/data/" in piece[entry + 46 : entry + 46 + name_size]:
            struct.pack_into("<I", data, entry + 16, next(tensors))
        entry += 46 + name_size + extra_size + comment_size
    return bytes(data)
