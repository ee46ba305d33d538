"""How fast a session is: prefill and decode at several lengths of the context."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass
from typing import List

import numpy as np

from ..progress import Report
from ..runtime.session import Session

SHORTEST = 512  # tokens of context; each length is four times the one before
DECODE_STEPS = 16


@dataclass(frozen=True)
class Speed:
    """context tokens in each sequence; tokens/s of all sequences together. prefill is of the whole
    prompt up to there; decode is the median of DECODE_STEPS steps."""

    context: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    decode_ms: float


def bench(session: Session, report: Report) -> List[Speed]:
    """Measure an empty session at every length that it has room for; it is empty afterwards."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, session.config.vocab_size, session.capacity).tolist()
    lengths = lengths_for(session.capacity)
    found, prefill, begin = [], 0.0, 0
    for length in lengths:
        for first in range(begin, length, session.chunk):
            step = tokens[first : min(first + session.chunk, length)]
            prefill += _seconds(session, step)
            report("measuring", first, lengths[-1])
        times = [_seconds(session, tokens[:1]) for _ in range(1 + DECODE_STEPS)]
        session.rollback([length] * session.batch)
        step_time = statistics.median(times[1:])  # the first may set things up
        found.append(
            Speed(
                context=length,
                prefill_tokens_per_s=session.batch * length / prefill,
                decode_tokens_per_s=session.batch / step_time,
                decode_ms=1000 * step_time,
            )
        )
        begin = length
    report("measuring", lengths[-1], lengths[-1])
    session.rollback([0] * session.batch)
    return found


def lengths_for(capacity: int) -> List[int]:
    """Lengths of context to measure at, with room for the steps of decode after each."""
    most = max(1, capacity - 1 - DECODE_STEPS)
    lengths = [min(SHORTEST, most)]
    while 4 * lengths[-1] <= most:
        lengths.append(4 * lengths[-1])
    if lengths[-1] * 2 <= most:
        lengths.append(most)
    return lengths


def peak_memory() -> int:
    """The most bytes that this process had in memory, without a GPU's."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _seconds(session: Session, tokens: List[int]) -> float:
    started = time.perf_counter()
    session.feed([tokens] * session.batch)
    return time.perf_counter() - started
