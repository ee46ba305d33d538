"""ldmatrix and mma.sync under the emulation, against two descriptions of the register layouts.

PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and "... for mma.m16n8k32":
formulas for the row and column of element i of a lane. CUTLASS's MMA_Traits (mma_traits_sm80.hpp,
SM80_16x8x16_F32F16F16F32_TN and SM80_16x8x32_S32S8S8S32_TN): shapes and strides of the same maps,
as offsets m + M k of A, n + N k of B and m + M n of C. Neither was used to write the emulation's
tables twice: the registers are filled here, and the product is numpy's.
"""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.plugins import toolchain

LANES = range(32)


@pytest.fixture(scope="module", params=["plain"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    source = Path(__file__).parent / "emulation" / "matrices.cpp"
    return ctypes.CDLL(str(toolchain.emulated(source, request.param, library=True)))


def _group(lane: int) -> int:
    return lane >> 2


def _in_group(lane: int) -> int:
    return lane % 4


# PTX ISA: (row, column) of element i of a lane, for A (m, k), B (k, n) and C (m, n).
def _ptx_a_f16(lane: int, i: int) -> tuple[int, int]:
    row = _group(lane) if 0 <= i < 2 or 4 <= i < 6 else _group(lane) + 8
    column = _in_group(lane) * 2 + (i & 0x1) + (0 if i < 4 else 8)
    return row, column


def _ptx_b_f16(lane: int, i: int) -> tuple[int, int]:
    return _in_group(lane) * 2 + (i & 0x1) + (0 if i < 2 else 8), _group(lane)


def _ptx_a_s8(lane: int, i: int) -> tuple[int, int]:
    row = _group(lane) if 0 <= i < 4 or 8 <= i < 12 else _group(lane) + 8
    column = _in_group(lane) * 4 + (i & 0x3) + (0 if i < 8 else 16)
    return row, column


def _ptx_b_s8(lane: int, i: int) -> tuple[int, int]:
    return _in_group(lane) * 4 + (i & 0x3) + (0 if i < 4 else 16), _group(lane)


def _ptx_c(lane: int, i: int) -> tuple[int, int]:
    return _group(lane) if i < 2 else _group(lane) + 8, _in_group(lane) * 2 + (i & 0x1)


PTX = {
    "f16": (_ptx_a_f16, _ptx_b_f16, _ptx_c),
    "s8": (_ptx_a_s8, _ptx_b_s8, _ptx_c),
}

# CUTLASS: strides of the lane's two digits (radix 4, 8), then shape and strides of its values, and
# the leading dimension of the offsets.
CUTLASS = {
    "f16": (
        ((32, 1), (2, 2, 2), (16, 8, 128), 16),
        ((16, 1), (2, 2), (8, 64), 8),
        ((32, 1), (2, 2), (16, 8), 16),
    ),
    "s8": (
        ((64, 1), (4, 2, 2), (16, 8, 256), 16),
        ((32, 1), (4, 2), (8, 128), 8),
        ((32, 1), (2, 2), (16, 8), 16),
    ),
}
ELEMENTS = {"f16": (8, 4, 4), "s8": (16, 8, 4)}  # of A, B and C in a lane
DEPTH = {"f16": 16, "s8": 32}


def _cutlass(lane_strides, shape, strides, leading):
    """{(lane, i): (first coordinate, second coordinate)}; the first digit of i varies fastest."""
    positions = {}
    for lane in LANES:
        for i, digits in enumerate(itertools.product(*(range(n) for n in reversed(shape)))):
            offset = (lane % 4) * lane_strides[0] + (lane // 4) * lane_strides[1]
            offset += sum(d * s for d, s in zip(reversed(digits), strides))
            positions[lane, i] = offset % leading, offset // leading
    return positions


def layouts(source: str, kind: str) -> list[dict[tuple[int, int], tuple[int, int]]]:
    """Positions in A (m, k), B (k, n) and C (m, n) by lane and element."""
    if source == "PTX":
        return [
            {(lane, i): f(lane, i) for lane in LANES for i in range(n)}
            for f, n in zip(PTX[kind], ELEMENTS[kind])
        ]
    a, b, c = (_cutlass(*layout) for layout in CUTLASS[kind])
    return [a, {at: (k, n) for at, (n, k) in b.items()}, c]


def gather(matrix: np.ndarray, layout: dict) -> np.ndarray:
    """[lane, element], each lane's elements in one row of registers."""
    elements = max(i for _, i in layout) + 1
    return np.array([[matrix[layout[lane, i]] for i in range(elements)] for lane in LANES])


def scatter(registers: np.ndarray, layout: dict, shape: tuple[int, int]) -> np.ndarray:
    matrix = np.full(shape, 0x7FFF, registers.dtype)
    for (lane, i), at in layout.items():
        matrix[at] = registers[lane, i]
    return matrix


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("kind", ["f16", "s8"])
def test_both_descriptions_agree(kind: str) -> None:
    assert layouts("PTX", kind) == layouts("CUTLASS", kind)


@pytest.mark.parametrize("source", ["PTX", "CUTLASS"])
@pytest.mark.parametrize("seed", range(3))
def test_mma_f16(library: ctypes.CDLL, source: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    # Small integers, so that every order of summation gives the same.
    a = random.integers(-9, 10, (16, 16)).astype(np.float16)
    b = random.integers(-9, 10, (16, 8)).astype(np.float16)
    c = random.integers(-99, 100, (16, 8)).astype(np.float32)
    la, lb, lc = layouts(source, "f16")
    ra, rb, rc = gather(a, la), gather(b, lb), gather(c, lc)
    rd = np.zeros((32, 4), np.float32)
    assert library.run_mma_f16(pointer(ra), pointer(rb), pointer(rc), pointer(rd)) == 0
    np.testing.assert_array_equal(scatter(rd, lc, (16, 8)), a.astype(np.float32) @ b + c)


@pytest.mark.parametrize("source", ["PTX", "CUTLASS"])
@pytest.mark.parametrize("seed", range(3))
def test_mma_s8(library: ctypes.CDLL, source: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    a = random.integers(-128, 128, (16, 32)).astype(np.int8)
    b = random.integers(-128, 128, (32, 8)).astype(np.int8)
    c = random.integers(-(1 << 20), 1 << 20, (16, 8)).astype(np.int32)
    la, lb, lc = layouts(source, "s8")
    ra, rb, rc = gather(a, la), gather(b, lb), gather(c, lc)
    rd = np.zeros((32, 4), np.int32)
    assert library.run_mma_s8(pointer(ra), pointer(rb), pointer(rc), pointer(rd)) == 0
    np.testing.assert_array_equal(scatter(rd, lc, (16, 8)), a.astype(np.int32) @ b + c)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(library: ctypes.CDLL, transposed: bool) -> None:
    """PTX ISA, "ldmatrix": lane l gets row l / 4, columns 2 (l % 4) and the next, of each."""
    matrices = np.random.default_rng(0).integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    registers = np.zeros((32, 7, 2), np.uint16)
    assert library.run_ldmatrix(pointer(matrices), int(transposed), pointer(registers)) == 0
    seen = matrices.transpose(0, 2, 1) if transposed else matrices
    want = [[m[lane // 4, 2 * (lane % 4) :][:2] for m in seen] for lane in LANES]
    for first, count in ((0, 1), (1, 2), (3, 4)):  # x1, x2, x4
        np.testing.assert_array_equal(
            registers[:, first : first + count], np.array(want)[:, :count]
        )
