"""Rounding of weights with feedback: GPTQ (Frantar et al. 2022, arXiv:2210.17323), to INT8.

The input channels of a linear are correlated. So each is rounded in turn, and what that adds to the
output is taken back by the channels that are still to come, as well as they can on the inputs that
calibration saw. This leaves a half of the error that rounding each weight to the nearest makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..progress import Report, silent
from . import blocks, qdq
from .inputs import LinearInputs
from .linears import Group, Linear
from .source import Source

DAMPING = 0.01  # of the mean square of the channels, added to each
COLUMNS = 128  # channels whose feedback to all later ones is given at once
OUTPUTS = 4096  # of a linear that are rounded at once
SMALLEST = 1e-12  # of a norm
MEMORY = 1 << 30  # bytes of second moments that are measured in one pass over the data


def rounded_weights(source: Source, folder: Path, report: Report = silent) -> dict[str, np.ndarray]:
    """The INT8 values of all linears' weights, by name, as the graph has them; files in `folder`.

    Measured on the sequences that calibration kept as its sample.
    """
    result = {}
    for group, moments in second_moments(source, report):
        divisor = source.smoothing.groups.get(group.name)
        if divisor is not None:
            moments /= divisor[:, None] * divisor[None, :]
        order, feedback = feedback_of(moments)
        for linear in group.linears:
            path = folder / f"{linear.name}.npy"
            np.save(path, _rounded_linear(source, linear, order, feedback))
            result[linear.weight] = np.load(path, mmap_mode="r")
            report("rounding weights", len(result), sum(len(g.linears) for g in source.groups))
    return result


def second_moments(source: Source, report: Report) -> Iterator[tuple[Group, np.ndarray]]:
    """X^T X [C,C] of each group's inputs, float32, from as many passes as memory asks for.

    Tokens count the same: their norms are made 1. The first of a sequence can be a thousand times
    larger than the others (Sun et al. 2024, arXiv:2402.17762), and would be all that is kept.
    """
    waiting = list(source.groups)
    while waiting:
        taken: list[Group] = []
        size = 0
        while waiting and (not taken or size + _bytes(source, waiting[0]) <= MEMORY):
            size += _bytes(source, waiting[0])
            taken.append(waiting.pop(0))
        yield from zip(taken, _moments(source, taken, report))


def _bytes(source: Source, group: Group) -> int:
    return 4 * len(source.calibration.tensors[group.name].channels) ** 2


def _moments(source: Source, taken: list[Group], report: Report) -> list[np.ndarray]:
    inputs = LinearInputs(source.bundle, source.weights.rotation, taken)
    sizes = [len(source.calibration.tensors[group.name].channels) for group in taken]
    result = [np.zeros((size, size), np.float32) for size in sizes]
    sample = source.calibration.sample
    done, total = 0, sum(map(len, sample))
    for sequence in sample:
        for stepper, values in inputs.steps(sequence):
            for moments, group in zip(result, taken):
                x = values[group.name].reshape(-1, len(moments))
                x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), SMALLEST)
                moments += x.T @ x
            report("measuring correlations", done + int(stepper.past[0]), total)
        done += len(sequence)
    return result


def feedback_of(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From X^T X [C,C]: the order in which channels are rounded, and, in that order, U [C,C].

    U is upper triangular and U^T U the inverse of X^T X: an error e in channel i is made good by
    subtracting e U[i,j] / U[i,i] from each later channel j.
    """
    squares = moments.diagonal()
    order = np.argsort(-squares, kind="stable")
    matrix = moments[np.ix_(order, order)].astype(np.float64)
    matrix[np.diag_indices_from(matrix)] += DAMPING * float(squares.mean()) or 1.0
    upper = np.linalg.cholesky(np.linalg.inv(matrix)).T
    return order, upper.astype(np.float32)


def rounded(weights: np.ndarray, order: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Weights [C,O] in units of their steps, float32, rounded with feedback: int8 [C,O]."""
    left = weights[order]
    result = np.empty(left.shape, np.int8)
    for begin in range(0, len(left), COLUMNS):
        end = min(begin + COLUMNS, len(left))
        part, near = left[begin:end], upper[begin:end, begin:end]
        errors = np.empty_like(part)
        for i in range(len(part)):
            whole = np.clip(np.rint(part[i]), -qdq.LEVELS, qdq.LEVELS)
            result[begin + i] = whole
            errors[i] = (part[i] - whole) / near[i, i]
            part[i + 1 :] -= near[i, i + 1 :, None] * errors[i]
        left[end:] -= upper[begin:end, end:].T @ errors
    back = np.empty_like(result)
    back[order] = result
    return back


def _rounded_linear(
    source: Source, linear: Linear, order: np.ndarray, feedback: np.ndarray
) -> np.ndarray:
    matrix = source.weights.read(linear.weight)
    rows, columns, scale = qdq.factors(matrix, source.smoothing, linear)
    result = np.empty(matrix.shape, np.int8)
    for begin in range(0, len(scale), OUTPUTS):
        part = slice(begin, begin + OUTPUTS)
        if linear.turned:
            steps = blocks.scaled(matrix[part], rows[part] / scale[part], columns)
            result[part] = rounded(np.ascontiguousarray(steps.T), order, feedback).T
        else:
            steps = blocks.scaled(matrix[:, part], rows, columns[part] / scale[part])
            result[:, part] = rounded(steps, order, feedback)
    return result
