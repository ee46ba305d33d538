"""The gate on the board: does a session give what PyTorch gave when the bundle was exported?

The session reads the prompts of reference.json and then PyTorch's own tokens, one in each step, so
that prefill and decode are both held to it. What is compared: the logits of PyTorch's best tokens,
and which token is the best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from ..bundle import Bundle
from ..errors import BadInput
from ..progress import Report
from ..runtime.session import Session

# How far a logit may be from PyTorch's, as a part of the size (rms) of PyTorch's best logits.
EXACT = 1e-3  # FP32, with sums in another order
ROUNDED = 2e-2  # ten bits of mantissa: FP16, and TF32, which TensorRT takes for FP32
MOST = 0.25  # whatever their size, as `export` has it for float16
# The index may choose another of two blocks that score nearly the same, which moves the logits of
# the tokens after it.
LEAST_WITHIN, LEAST_AGREEMENT = 0.95, 0.97
# INT8 weights or pages: how accurate they are is the business of `quantize` and `export`. Here the
# best token has to be the same as often as `quantize` measured, less three standard errors of a
# share of so few tokens.
STANDARD_ERRORS = 3
ASSUMED_AGREEMENT = 0.9  # of INT8 pages without INT8 weights, which nobody measured


@dataclass(frozen=True)
class Prompt:
    """One prompt of reference.json: its tokens, those that PyTorch chose after it, and after the
    prompt and each of these the ids and logits of the best tokens ([TOP] each)."""

    ids: List[int]
    greedy: List[int]
    top: List[Tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Limits:
    """tolerance: largest |difference| of a logit; measured: the agreement was measured in a longer
    text, and it alone counts."""

    tolerance: float
    agreement: float = LEAST_AGREEMENT
    measured: bool = False

    def least_agreement(self, positions: int) -> float:
        if not self.measured:
            return self.agreement
        error = math.sqrt(self.agreement * (1 - self.agreement) / positions)
        return self.agreement - STANDARD_ERRORS * error


@dataclass(frozen=True)
class Outcome:
    """What was measured, over all positions of the prompts that the session has room for.

    agreement  share of positions whose best token is PyTorch's, or is one that PyTorch gave nearly
               the same logit
    within     share of the compared logits within the tolerance
    largest    largest |difference| of a logit, infinite where one is not a number
    """

    prompts: int
    positions: int
    agreement: float
    within: float
    largest: float
    limits: Limits

    def fault(self) -> Optional[str]:
        """The first thing that is not as it has to be, in words; None if all is."""
        least = self.limits.least_agreement(self.positions)
        if not math.isfinite(self.largest):
            return "a logit is not a finite number"
        if self.agreement < least:
            return "its best token is PyTorch's in %.1f %% of %d places (at least %.1f %%)" % (
                100 * self.agreement,
                self.positions,
                100 * least,
            )
        if self.within < LEAST_WITHIN and not self.limits.measured:
            return "%.1f %% of its logits are within %.2g of PyTorch's (at least %g %%)" % (
                100 * self.within,
                self.limits.tolerance,
                100 * LEAST_WITHIN,
            )
        return None

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "limits": dict(vars(self.limits)), "passed": self.fault() is None}


def limits_of(bundle: Bundle, prompts: List[Prompt], precision: str, exact: bool) -> Limits:
    """What a session of a precision is held to.

    exact: it computes in FP32 where the graph says so, as ONNX Runtime does and TensorRT does not.
    """
    logits = np.concatenate([logits for prompt in prompts for _, logits in prompt.top])
    size = float(np.sqrt(np.mean(np.square(logits, dtype=np.float64))))
    tolerance = min(MOST, size * (EXACT if exact and precision == "fp32" else ROUNDED))
    if precision == "int8":
        gate = (bundle.manifest["quantization"] or {}).get("gate")
        measured = gate.get("top1_agreement") if isinstance(gate, dict) else None
        if not isinstance(measured, (int, float)) or not 0 <= measured <= 100:
            return Limits(tolerance, ASSUMED_AGREEMENT, measured=True)
        return Limits(tolerance, measured / 100, measured=True)
    if bundle.config.kv_dtype == "int8":
        return Limits(tolerance, ASSUMED_AGREEMENT, measured=True)
    return Limits(tolerance)


def compare(session: Session, prompts: List[Prompt], limits: Limits, report: Report) -> Outcome:
    """Feed the prompts that the session has room for; it is empty before and afterwards.

    Raises BadInput where it has room for none.
    """
    fitting = [p for p in prompts if len(p.ids) + len(p.greedy) <= session.capacity]
    if not fitting:
        raise BadInput(
            "the reference outputs have no prompt of at most %d tokens: take a longer context"
            % session.capacity
        )
    total = sum(len(prompt.ids) + len(prompt.greedy) for prompt in fitting)
    done, agreeing, differences = 0, [], []
    for prompt in fitting:
        session.rollback([0] * session.batch)
        chunks = [
            prompt.ids[i : i + session.chunk] for i in range(0, len(prompt.ids), session.chunk)
        ]
        steps = [*chunks, *([token] for token in prompt.greedy)]
        for i, step in enumerate(steps):
            logits = session.feed([step] + [[]] * (session.batch - 1))[0, 0]
            done += len(step)
            report("comparing with PyTorch", done, total)
            if i < len(chunks) - 1:
                continue
            ids, theirs = prompt.top[i - len(chunks) + 1]
            differences.append(np.abs(logits[ids] - theirs))
            best = theirs[ids == logits.argmax()]
            agreeing.append(bool(best.size) and theirs[0] - best[0] <= 2 * limits.tolerance)
    session.rollback([0] * session.batch)
    change = np.nan_to_num(np.concatenate(differences), nan=np.inf)
    return Outcome(
        prompts=len(fitting),
        positions=len(agreeing),
        agreement=float(np.mean(agreeing)),
        within=float((change <= limits.tolerance).mean()),
        largest=float(change.max()),
        limits=limits,
    )


def prompts_of(bundle: Bundle) -> List[Prompt]:
    """The reference outputs of a bundle (edgepool/exporter/reference.py says what they are).

    Raises BadInput where it has none, or damaged ones.
    """
    record = bundle.reference()
    try:
        prompts = [_prompt(entry, bundle.config.vocab_size) for entry in record["prompts"]]
        if not prompts:
            raise ValueError
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise BadInput(
            "%s: not as `edgepool export` writes it: export the bundle anew"
            % (bundle.path / str(bundle.manifest["reference"]))
        ) from error
    return prompts


def _prompt(entry: Dict[str, Any], vocabulary: int) -> Prompt:
    ids, greedy = [int(i) for i in entry["ids"]], [int(i) for i in entry["greedy"]]
    top = [np.array(rows, np.float64) for rows in entry["top"]]
    if not ids or len(top) != 1 + len(greedy):
        raise ValueError
    for rows in top:
        if rows.ndim != 2 or rows.shape[1] != 2 or not rows.size or not np.isfinite(rows).all():
            raise ValueError
    known = [*ids, *greedy, *(int(i) for rows in top for i in rows[:, 0])]
    if not 0 <= min(known) <= max(known) < vocabulary:
        raise ValueError
    return Prompt(
        ids, greedy, [(r[:, 0].astype(np.int64), r[:, 1].astype(np.float32)) for r in top]
    )
