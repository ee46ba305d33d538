"""Choosing the next token from logits, in numpy.

The steps and their order are those of Hugging Face transformers (repetition penalty, temperature,
top-k, top-p), so that settings carry over; tests compare the distributions with its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Optional, Tuple

import numpy as np

from ..errors import BadInput, GateFailed

HEAD = 256  # candidates that top-p sorts at first; a text model rarely needs more


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature         logits are divided by it; 0 takes the most likely token (greedy)
    top_k               keep the k largest logits, and those equal to the smallest of them; 0: all
    top_p               keep the fewest most likely tokens whose probabilities sum to top_p or more
    repetition_penalty  logits of tokens that occurred (prompt included) are divided by it where
                        positive and multiplied by it where negative (Keskar et al. 2019,
                        arXiv:1909.05858); 1: none
    seed                the same seed gives the same text; None draws one
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: Optional[int] = None

    def __post_init__(self) -> None:
        _need(0 <= self.temperature < float("inf"), "temperature", self, "a number of 0 or more")
        _need(self.top_k >= 0, "top_k", self, "0 (all) or a positive number")
        _need(0 < self.top_p <= 1, "top_p", self, "above 0 and at most 1")
        _need(0 < self.repetition_penalty < float("inf"), "repetition_penalty", self, "above 0")
        _need(self.seed is None or self.seed >= 0, "seed", self, "0 or more")


class Sampler:
    """Draws the tokens of one sequence, and knows which it has seen."""

    def __init__(self, settings: Sampling, vocab_size: int) -> None:
        self._settings = settings
        self._seen = np.zeros(vocab_size, bool)
        self._random = np.random.default_rng(settings.seed)

    def see(self, token_ids: Iterable[int]) -> None:
        """Count tokens as having occurred (for the repetition penalty)."""
        self._seen[np.asarray(list(token_ids), np.int64)] = True

    def draw(self, logits: np.ndarray) -> int:
        """The next token for logits [vocab] float32; it counts as seen from then on."""
        if not np.isfinite(logits.max()):
            raise GateFailed(
                "the model's logits are not finite: "
                "check it with `edgepool verify`, or export it with --dtype fp32"
            )
        logits = penalised(logits, self._seen, self._settings.repetition_penalty)
        if self._settings.temperature == 0:
            token = int(logits.argmax())
        else:
            tokens, probabilities = distribution(logits, self._settings)
            # One uniform number a token, and no library routine that may change between versions.
            point = self._random.random() * probabilities.sum()
            index = np.searchsorted(np.cumsum(probabilities), point, side="right")
            token = int(tokens[min(int(index), len(tokens) - 1)])
        self._seen[token] = True
        return token


def penalised(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    """Logits [vocab] after the repetition penalty on the tokens marked in seen [vocab] bool."""
    if penalty == 1:
        return logits
    repeated = np.where(logits > 0, logits / penalty, logits * penalty)
    return np.where(seen, repeated, logits)


def distribution(logits: np.ndarray, settings: Sampling) -> Tuple[np.ndarray, np.ndarray]:
    """Tokens that temperature, top-k and top-p leave, with their probabilities.

    logits [vocab] float32 -> token ids [N], probabilities [N] float64 that sum to 1; with top_p
    below 1 the most likely token comes first, else the lowest id.
    """
    tokens = np.arange(len(logits))
    if 0 < settings.top_k < len(logits):
        tokens = _largest(logits, settings.top_k)
    scores = logits[tokens].astype(np.float64)
    weights = np.exp((scores - scores.max()) / settings.temperature)
    probabilities = weights / weights.sum()
    if settings.top_p < 1:
        kept = _nucleus(probabilities, settings.top_p)
        tokens, probabilities = tokens[kept], probabilities[kept] / probabilities[kept].sum()
    return tokens, probabilities


def _nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Indices of the fewest probabilities that sum to top_p, largest first, ties by index.

    Only the head of the distribution is sorted, and more of it while that falls short.
    """
    size = HEAD
    while True:
        head = _largest(probabilities, size)
        head = head[np.argsort(-probabilities[head], kind="stable")]
        total = np.cumsum(probabilities[head])
        if total[-1] >= top_p or size >= len(probabilities):
            return head[: int(np.searchsorted(total, top_p)) + 1]
        size *= 8


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices, ascending, of the `count` largest values and those equal to the least of them."""
    if count >= len(values):
        return np.arange(len(values))
    return np.flatnonzero(values >= np.partition(values, -count)[-count])


def _need(ok: bool, name: str, settings: Sampling, expected: str) -> None:
    if not ok:
        raise BadInput("%s: %r is not %s" % (name, getattr(settings, name), expected))
