"""Write a `torch.save` archive one tensor at a time.

`torch.save` wants every tensor in memory at once. Here it writes the archive with holes
(`torch.serialization.skip_data`) into a list, and the holes are filled from `LazyTensor.read` while
the file is written front to back, so the peak is the largest tensor.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Union, cast

import torch
from torch import Tensor

from ..files import new_file
from ..progress import Report
from .weights import LazyTensor, Weight, check_finite

# PKWARE's APPNOTE.TXT, 4.3. After a record's data comes a descriptor: signature, CRC-32, sizes. The
# archive ends with the central directory (an entry per record: 46 bytes and its name), in ZIP64 the
# end of that (56) and its locator (20), and the end of it in the old form (22).
LOCATOR64 = b"PK\x06\x07"
ENTRY_BYTES, END64_BYTES, LOCATOR64_BYTES, END_BYTES = 46, 56, 20, 22


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
        for number, piece in enumerate(pieces):
            if isinstance(piece, bytes):
                last = number == len(pieces) - 1
                stream.write(_with_checksums(piece, checksums, last))
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

    def seek(self, offset: int, whence: int) -> None:  # whence: the current place
        self.pieces.append(offset)

    def flush(self) -> None:
        pass


def _layout(value: Any) -> list[Union[bytes, int]]:
    layout = _Layout()
    with torch.serialization.skip_data():
        torch.save(value, cast(BinaryIO, layout))
    return layout.pieces


def _with_checksums(piece: bytes, checksums: list[int], last: bool) -> bytes:
    """Fill in the CRC-32 that follows each tensor, and the copies in the central directory."""
    data = bytearray(piece)
    if checksums:  # a tensor came before: the piece begins with its descriptor
        struct.pack_into("<I", data, 4, checksums[-1])
    if last:
        tensors = iter(checksums)
        for entry, name in _directory(piece):
            if b"/data/" in name:
                struct.pack_into("<I", data, entry + 16, next(tensors))
    return bytes(data)


def _directory(piece: bytes) -> Iterator[tuple[int, bytes]]:
    """Where each entry of the central directory begins in the last piece, and its record's name.

    Found from the end, whose place is known: texts in front of it may look like an entry.
    """
    end = len(piece) - END_BYTES
    (size,) = struct.unpack_from("<I", piece, end + 12)
    if piece.startswith(LOCATOR64, end - LOCATOR64_BYTES):
        end -= LOCATOR64_BYTES + END64_BYTES
        (size,) = struct.unpack_from("<Q", piece, end + 40)
    at = end - size
    while at < end:
        name_size, extra_size, comment_size = struct.unpack_from("<HHH", piece, at + 28)
        yield at, piece[at + ENTRY_BYTES : at + ENTRY_BYTES + name_size]
        at += ENTRY_BYTES + name_size + extra_size + comment_size
