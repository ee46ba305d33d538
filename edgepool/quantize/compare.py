"""Two graphs of one model on one text: how well each predicts it, and how their layers differ.

Both run on ONNX Runtime, chunk by chunk, so memory does not grow with the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from ..config import ModelConfig
from ..exporter.lower import runnable
from ..exporter.probe import hidden_states, read_graph, watch
from ..progress import Report, silent
from .rotation import Basis
from .runner import CHUNK, Stepper, open_graph


@dataclass
class LayerError:
    """Sums over all tokens of a layer's output: of squared differences, squares and products."""

    difference: float = 0.0
    reference: float = 0.0
    candidate: float = 0.0
    product: float = 0.0

    def add(self, reference: np.ndarray, candidate: np.ndarray) -> None:
        a = reference.astype(np.float64).reshape(-1)
        b = candidate.astype(np.float64).reshape(-1)
        self.difference += float(np.sum((b - a) ** 2))
        self.reference += float(a @ a)
        self.candidate += float(b @ b)
        self.product += float(a @ b)

    @property
    def relative(self) -> float:
        """|candidate - reference| / |reference|."""
        return math.sqrt(self.difference / self.reference) if self.reference else 0.0

    @property
    def cosine(self) -> float:
        norm = math.sqrt(self.reference * self.candidate)
        return self.product / norm if norm else 1.0


@dataclass
class Comparison:
    """What the candidate makes of a text, beside the reference.

    nll values are sums of -log p(next token), squares the sum of the squares of their differences;
    kl_sum adds KL(reference || candidate) up; agreed counts positions at which both prefer the same
    token.
    """

    predicted: int = 0
    positions: int = 0
    reference_nll: float = 0.0
    candidate_nll: float = 0.0
    squares: float = 0.0
    kl_sum: float = 0.0
    agreed: int = 0
    layers: dict[str, LayerError] = field(default_factory=dict)

    @property
    def perplexities(self) -> tuple[float, float]:
        """Of the reference and of the candidate."""
        n = max(self.predicted, 1)
        return math.exp(self.reference_nll / n), math.exp(self.candidate_nll / n)

    @property
    def perplexity_increase(self) -> float:
        """In per cent of the reference's."""
        return 100 * math.expm1((self.candidate_nll - self.reference_nll) / max(self.predicted, 1))

    @property
    def perplexity_error(self) -> float:
        """The standard error of the increase, in per cent: of a mean of paired differences."""
        n = max(self.predicted, 1)
        mean = (self.candidate_nll - self.reference_nll) / n
        return 100 * math.sqrt(max(self.squares / n - mean**2, 0.0) / n)

    @property
    def agreement(self) -> float:
        """Per cent of positions with the same most likely token."""
        return 100 * self.agreed / max(self.positions, 1)

    @property
    def kl(self) -> float:
        """Mean KL divergence per position, in nats."""
        return self.kl_sum / max(self.positions, 1)

    def add(self, reference: np.ndarray, candidate: np.ndarray, following: np.ndarray) -> None:
        """Logits [S,vocab] of both, and the tokens that follow [S] or, at the end, [S-1]."""
        count = len(following)
        p, q = _log_softmax(reference), _log_softmax(candidate)
        at = np.arange(count)
        mine, theirs = (x[at, following].astype(np.float64) for x in (p, q))
        self.reference_nll -= float(mine.sum())
        self.candidate_nll -= float(theirs.sum())
        self.squares += float(np.square(theirs - mine).sum())
        self.predicted += count
        self.agreed += int((reference.argmax(-1) == candidate.argmax(-1)).sum())
        self.positions += len(reference)
        q -= p
        np.exp(p, out=p)
        self.kl_sum -= float((p * q).sum(dtype=np.float64))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass(frozen=True)
class Graph:
    """A graph to run: its file, the configuration that its state follows, the basis of its layers'
    outputs where that is not the checkpoint's."""

    path: Path
    config: ModelConfig
    basis: Basis | None = None

    def open(self, layers: bool) -> tuple[onnx.ModelProto, list[str]]:
        """The graph that ONNX Runtime runs, with layers' outputs where they are wanted."""
        model = runnable(read_graph(self.path))
        names = hidden_states(model) if layers else []
        watch(model, names)
        return model, names


def compare(
    reference: Graph,
    candidate: Graph,
    ids: np.ndarray,
    layers: bool = True,
    chunk: int = CHUNK,
    report: Report = silent,
) -> Comparison:
    """Run both graphs over one text [n] int32."""
    steppers = []
    for graph in (reference, candidate):
        model, names = graph.open(layers)
        session = open_graph(model, graph.path.parent)
        steppers.append(Stepper(session, graph.config, 1, len(ids)))
    result = Comparison(layers={name: LayerError() for name in names})
    for begin in range(0, len(ids), chunk):
        part = ids[None, begin : begin + chunk]
        mine, theirs = (s.step(part, range(part.shape[1])) for s in steppers)
        following = ids[begin + 1 : begin + 1 + part.shape[1]]
        result.add(mine["logits"][0], theirs["logits"][0], following)
        for name, error in result.layers.items():
            bases = (graph.basis for graph in (reference, candidate))
            values = (each[name] for each in (mine, theirs))
            error.add(*(x if basis is None else basis.back(x) for x, basis in zip(values, bases)))
        report("comparing with FP32", min(begin + chunk, len(ids)), len(ids))
    return result
