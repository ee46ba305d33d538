"""Rotation: in another basis nothing has outliers (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456).

A token that is large in a few channels has a length like any other, and in a basis that shares
nothing with these channels it is small in all of them. RMSNorm sees lengths only, so that the whole
residual stream x can be x R, with R orthogonal, at no cost where it runs:

    embedding E -> E R               weight that writes, o_proj and down_proj: W -> W R
    norm, weight g -> 1, 1, ...      weight that reads a norm's output: W -> R^T diag(g) W
    v_proj: each head W -> W V       o_proj, which reads it: each head W -> V^T W

with weights as [in, out]. Where the LM head shares the embedding's table, g stays outside of it:
what the head reads is multiplied by R^T diag(g) R, the one product that rotation adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx

from ..bundle import Bundle
from ..config import ModelConfig
from . import blocks
from .linears import EMBEDDING, HEAD, SUFFIX, Group
from .stored import StoredWeights

VALUES, ATTENDED, WRITERS = "v_proj", "o_proj", ("o_proj", "down_proj")
NORMS = ("norm", "attn_norm", "mlp_norm")  # of the residual stream


@dataclass(frozen=True)
class Basis:
    """An orthogonal R [n,n]: random signs, then Hadamard and cosine transforms, n = 2^k * odd.

    No channel of x R takes more than sqrt(2) times its equal part of any channel of x.
    """

    size: int

    def turned(self, x: np.ndarray) -> np.ndarray:
        """x R over the last axis, float32."""
        signs, left, right = self._factors
        return _product(x * signs, left, right)

    def back(self, x: np.ndarray) -> np.ndarray:
        """x R^T over the last axis, float32."""
        signs, left, right = self._factors
        return _product(x, left, right.T) * signs

    @cached_property
    def _factors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Signs [n], and two factors of like size of which the rest of R is the Kronecker product.

        The left one is symmetric. The right one has the cosines, an orthonormal DCT-II.
        """
        power = self.size & -self.size
        odd, some = self.size // power, 1 << (power.bit_length() - 1) // 2
        # RandomState: numpy keeps its stream for ever
        signs = np.random.RandomState(0).choice(np.array([-1, 1], np.float32), self.size)
        at = np.arange(odd)
        cosines = np.cos(np.pi * np.outer(at, 2 * at + 1) / (2 * odd)) * np.sqrt(2 / odd)
        cosines[0] /= np.sqrt(2)
        right = np.kron(_hadamard(power // some), cosines)
        return signs, _hadamard(some).astype(np.float32), right.astype(np.float32)


def _hadamard(size: int) -> np.ndarray:
    """The orthonormal Hadamard transform of a power of two (Sylvester's)."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def _product(x: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """x (left kron right) over the last axis, in n^1.5 operations; left is symmetric."""
    inner = x.astype(np.float32, copy=False).reshape(-1, len(right)) @ right
    return np.matmul(left, inner.reshape(-1, len(left), len(right))).reshape(x.shape)


@dataclass(frozen=True)
class Rotation:
    """The bases of a model: of its residual stream, and of the heads of V."""

    residual: Basis
    values: Basis
    tied: bool

    @classmethod
    def of(cls, config: ModelConfig) -> Rotation:
        return cls(Basis(config.hidden_size), Basis(config.head_dim), config.tie_embeddings)

    def norm_before(self, linear: str) -> str | None:
        """The norm whose weight goes into a linear that reads its output."""
        parts = linear.split(".")
        if linear == HEAD:
            return None if self.tied else "norm"
        if parts[0] != "layers":
            return None
        if parts[2] in ("gate_proj", "up_proj"):
            return f"layers.{parts[1]}.mlp_norm"
        if parts[2] in ("q_proj", "k_proj", VALUES, "index"):
            return f"layers.{parts[1]}.attn_norm"
        return None

    def watched(self, graph: onnx.GraphProto, group: Group) -> str:
        """The value of the FP32 graph that `inputs` takes: before a norm's weight comes in."""
        norm = self.norm_before(group.name)
        if norm is None:
            return group.value
        weight = f"{norm}{SUFFIX}"
        reader = next(node for node in graph.node if weight in node.input)
        return next(name for name in reader.input if name != weight)

    def inputs(self, group: Group, x: np.ndarray) -> np.ndarray:
        """What the group's linears read in the rotated model, from the value `watched`, [.., C]."""
        if self.norm_before(group.name) is not None or group.name == HEAD:
            return self.residual.turned(x)
        if group.name.endswith(ATTENDED):
            return self.heads(x)
        return x

    def heads(self, x: np.ndarray) -> np.ndarray:
        """Each head of the last axis in the basis of V."""
        return self.values.turned(x.reshape(*x.shape[:-1], -1, self.values.size)).reshape(x.shape)


@dataclass(frozen=True)
class RotatedWeights:
    """The weights of the rotated model, as the graph has them, read one at a time."""

    stored: StoredWeights
    config: ModelConfig
    rotation: Rotation

    @classmethod
    def of(cls, bundle: Bundle) -> RotatedWeights:
        stored = StoredWeights.of(bundle.model_path)
        return cls(stored, bundle.config, Rotation.of(bundle.config))

    def read(self, name: str) -> np.ndarray:
        rotation, array = self.rotation, self.stored.read(name)
        linear = name.removesuffix(SUFFIX)
        kind = linear.rpartition(".")[2]
        if kind in NORMS:
            return np.ones_like(array)
        if name == EMBEDDING:
            return _rows(rotation.residual.turned, array)
        if name.endswith(f"{VALUES}.bias"):
            return rotation.heads(array)
        if array.ndim != 2:
            return array
        norm = rotation.norm_before(linear)
        if norm is not None:
            gain = self.stored.read(f"{norm}{SUFFIX}")
            array = _columns(lambda part: rotation.residual.turned(part * gain), array)
        if kind == VALUES:
            array = _rows(rotation.heads, array)
        if kind == ATTENDED:
            array = _columns(rotation.heads, array)
        if kind in WRITERS:
            array = _rows(rotation.residual.turned, array)
        return array

    def head_input(self) -> np.ndarray:
        """R^T diag(g) R, float32: for an LM head that shares the embedding's table."""
        turned = self.rotation.residual.turned
        return turned(turned(np.diag(self.stored.read(f"norm{SUFFIX}"))).T)


Turn = Callable[[np.ndarray], np.ndarray]


def _rows(turn: Turn, matrix: np.ndarray) -> np.ndarray:
    """Every row turned: float32."""
    result = np.empty(matrix.shape, np.float32)
    for part in blocks.blocks(matrix):
        result[part] = turn(matrix[part])
    return result


def _columns(turn: Turn, matrix: np.ndarray) -> np.ndarray:
    """Every column turned: float32."""
    result = np.empty(matrix.shape, np.float32)
    for part in blocks.blocks(matrix.T):
        result[:, part] = turn(matrix[:, part].T).T
    return result
