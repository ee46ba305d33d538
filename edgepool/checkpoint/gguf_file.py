"""The header of a GGUF file: metadata, and where each tensor lies.

Format: ggml's docs/gguf.md. `gguf.GGUFReader` reads the same, but makes an array per vocabulary
entry (8 s for 49,152 tokens) and trusts every length in the file; here lengths are checked first.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import BadInput

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class GGUFTensor:
    """shape is row-major ([out, in] for a linear weight), as numpy and torch have it."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    row_bytes: int


class GGUFFile:
    """metadata: key -> number, string, or list of them; tensors: by name.

    Raises BadInput for a truncated file, another version or byte order, or an unknown tensor kind.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as stream:
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self.metadata, self.tensors = self._header()
        except UnicodeDecodeError as error:
            raise self._bad(f"a name at byte {self._at} is not UTF-8") from error

    def rows(self, tensor: GGUFTensor, start: int, count: int) -> np.ndarray:
        """[count, row_bytes] uint8: rows of the tensor as they are stored (a vector is one row)."""
        offset = tensor.offset + start * tensor.row_bytes
        data = np.frombuffer(self._data, np.uint8, count * tensor.row_bytes, offset)
        return data.reshape(count, tensor.row_bytes)

    def _header(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if bytes(self._take(4)) != MAGIC:
            raise self._bad("not a GGUF file")
        version = self._u32()
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0
            raise self._bad("big-endian" if swapped else f"GGUF version {version}, not 2 or 3")
        tensor_count, key_count = self._u64(), self._u64()
        metadata = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(self._u32())
        described = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not (isinstance(alignment, int) and alignment > 0):
            raise self._bad(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in described:
            if name in tensors:
                raise self._bad(f"tensor '{name}' is there twice")
            tensors[name] = self._place(name, shape, kind, start + offset)
        return metadata, tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._u32()
        if not 1 <= dimensions <= 4:
            raise self._bad(f"tensor '{name}' has {dimensions} dimensions")
        shape = tuple(self._u64() for _ in range(dimensions))[::-1]
        return name, shape, self._u32(), self._u64()

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            named = GGMLQuantizationType(kind)
        except ValueError:
            raise self._bad(f"tensor '{name}' is of an unknown kind ({kind})") from None
        block, block_bytes = GGML_QUANT_SIZES[named]
        if shape[-1] % block:
            raise self._bad(
                f"tensor '{name}': rows of {shape[-1]} are not whole {named.name} blocks"
            )
        row_bytes = shape[-1] // block * block_bytes
        rows = 1
        for size in shape[:-1]:
            rows *= size
        if offset + rows * row_bytes > len(self._data):
            raise self._bad(f"truncated: tensor '{name}' ends beyond the file")
        return GGUFTensor(name, shape, named, offset, row_bytes)

    def _value(self, kind: int) -> Any:
        if kind == ARRAY:
            kind, count = self._u32(), self._u64()
            if kind == STRING:
                return [self._string() for _ in range(count)]
            dtype = self._scalar(kind)
            return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        if kind == STRING:
            return self._string()
        return np.frombuffer(self._take(self._scalar(kind).itemsize), self._scalar(kind))[0].item()

    def _scalar(self, kind: int) -> np.dtype:
        if kind not in SCALARS:
            raise self._bad(f"metadata of an unknown kind ({kind}) at byte {self._at}")
        return np.dtype(SCALARS[kind])

    def _string(self) -> str:
        return str(self._take(self._u64()), "utf-8")

    def _u32(self) -> int:
        return struct.unpack("<I", self._take(4))[0]

    def _u64(self) -> int:
        return struct.unpack("<Q", self._take(8))[0]

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise self._bad(f"truncated, or damaged, at byte {self._at}")
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def _bad(self, fault: str) -> BadInput:
        return BadInput(f"{self.path}: {fault}")
