"""Arithmetic on matrices that may be gigabytes on disk: a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

BLOCK = 1 << 23  # elements in memory at once


def blocks(matrix: np.ndarray) -> Iterator[slice]:
    """Slices of rows that hold about BLOCK elements each."""
    rows = max(1, BLOCK // max(1, matrix.shape[1]))
    for begin in range(0, matrix.shape[0], rows):
        yield slice(begin, begin + rows)


def largest(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray, axis: int) -> np.ndarray:
    """max over `axis` of |matrix * rows[:, None] * columns[None, :]|: float32."""
    kept, reduced = (columns, rows) if axis == 0 else (rows, columns)
    found = np.zeros(len(kept), np.float32)
    for part in blocks(matrix):
        values = np.abs(matrix[part].astype(np.float32, copy=False))
        if axis == 0:
            found = np.maximum(found, (values * np.abs(reduced[part])[:, None]).max(0))
        else:
            found[part] = (values * np.abs(reduced)[None, :]).max(1)
    return found * np.abs(kept)


def energy(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> float:
    """The sum of (matrix * rows[:, None] * columns[None, :])^2."""
    total = 0.0
    for part in blocks(matrix):
        squares = np.square(matrix[part], dtype=np.float32) @ np.square(columns)
        total += float(np.square(rows[part]) @ squares)
    return total


def scaled(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """matrix * rows[:, None] * columns[None, :] in float32."""
    result = matrix.astype(np.float32)
    result *= rows[:, None]
    result *= columns[None, :]
    return result


def quantised(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """`scaled`, rounded half to even and held to [-127, 127]: int8."""
    result = np.empty(matrix.shape, np.int8)
    for part in blocks(matrix):
        values = scaled(matrix[part], rows[part], columns)
        result[part] = np.clip(np.rint(values), -127, 127)
    return result
