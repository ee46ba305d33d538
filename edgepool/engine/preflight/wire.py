"""Values of single protobuf fields, on top of `onnxfile.fields`."""

from __future__ import annotations

import struct
from typing import List

from ...onnxfile import BYTES, FIXED32, VARINT, Buffer, Field, Malformed


def text(data: Buffer, f: Field) -> str:
    return bytes(data[f.body : f.end]).decode("utf-8", "replace")


def number(data: Buffer, f: Field) -> int:
    """A varint as a signed 64-bit integer."""
    if f.kind != VARINT:
        raise Malformed("a number is stored as something else")
    return _varints(bytes(data[f.body : f.end]))[-1]


def numbers(data: Buffer, found: List[Field]) -> List[int]:
    """The integers of a repeated field, packed or not."""
    return [x for f in found for x in _varints(bytes(data[f.body : f.end]))]


def _varints(raw: bytes) -> List[int]:
    out, value, shift = [], 0, 0
    for byte in raw:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            value &= (1 << 64) - 1
            out.append(value - (1 << 64) if value >> 63 else value)
            value = shift = 0
    return out


def floats(data: Buffer, found: List[Field]) -> List[float]:
    packed = b"".join(bytes(data[f.body : f.end]) for f in found if f.kind in (BYTES, FIXED32))
    return list(struct.unpack("<%df" % (len(packed) // 4), packed[: len(packed) // 4 * 4]))
