"""The gate on the board: what passes, what does not, and damaged reference outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from edgepool import bundle as bundles
from edgepool.board import gate
from edgepool.board.gate import Limits, Outcome, Prompt, compare
from edgepool.bundle import Bundle
from edgepool.errors import BadInput
from edgepool.runtime.session import Session
from tests.runtime.fakes import FakeBackend, config, fake_session

LIMITS = Limits(0.01)


def silent(step: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def prompts(lengths: tuple[int, ...] = (40, 13, 1), steps: int = 8) -> list[Prompt]:
    """What a session of the same model said."""
    session, found = fake_session(config()), []
    for length in lengths:
        session.rollback([0])
        ids = np.random.default_rng(length).integers(0, 300, length).tolist()
        logits, greedy, top = session.feed([ids])[0, 0], [], []
        for _ in range(steps + 1):
            best = np.argsort(-logits)[:5]
            top.append((best, logits[best].copy()))
            greedy.append(int(best[0]))
            logits = session.feed([[greedy[-1]]])[0, 0]
        found.append(Prompt(ids, greedy[:-1], top))
    return found


class Changed(FakeBackend):
    """A backend whose logits go through a function."""

    def __init__(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(config(), 1, 20)
        self._change = change

    def step(self, *inputs: Any, read: bool = True) -> np.ndarray:
        return self._change(super().step(*inputs))


def outcome(change: Callable[[np.ndarray], np.ndarray], limits: Limits = LIMITS) -> Outcome:
    session = Session(config(), Changed(change), 1, 64, 16)
    return compare(session, prompts(), limits, silent)


def test_the_same_model_passes() -> None:
    found = outcome(lambda logits: logits)
    assert (found.prompts, found.positions, found.agreement, found.largest) == (3, 27, 1.0, 0.0)
    assert found.fault() is None
    assert found.to_dict()["passed"]


def test_chunks_batches_and_order_do_not_matter() -> None:
    for session in (fake_session(config(), chunk=5), fake_session(config(), batch=3)):
        session.feed([[7]] * session.batch)
        assert compare(session, prompts(), LIMITS, silent).largest == 0
        assert session.lengths.tolist() == [0] * session.batch


def test_prompts_that_do_not_fit_are_left_out() -> None:
    session = fake_session(config(), capacity=24)
    assert compare(session, prompts(), LIMITS, silent).prompts == 2
    with pytest.raises(BadInput, match="no prompt of at most 8 tokens"):
        compare(fake_session(config(), capacity=8), prompts(), LIMITS, silent)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x * np.nan, "not a finite number"),
        (lambda x: np.where(np.arange(x.shape[-1]) == 3, np.inf, x), "best token"),
        (lambda x: np.roll(x, 1, axis=-1), "best token is PyTorch's in 0.0 %"),
        (lambda x: x + np.float32(0.02), "0.0 % of its logits are within 0.01"),
    ],
)
def test_another_model_does_not(change: Callable[[np.ndarray], np.ndarray], words: str) -> None:
    assert words in (outcome(change).fault() or "")


def test_a_tie_is_no_difference() -> None:
    """The second best token, raised above the best by less than twice the tolerance."""

    def swap(logits: np.ndarray) -> np.ndarray:
        order = np.argsort(-logits, axis=-1)[..., :2]
        best, second = np.moveaxis(np.take_along_axis(logits, order, -1), -1, 0)
        near = best - second < 0.015
        changed = logits.copy()
        raised = np.where(near, best + 0.001, second)[..., None]
        np.put_along_axis(changed, order[..., 1:], raised, -1)
        return changed

    assert outcome(swap).agreement == 1


def test_int8_is_held_to_what_was_measured() -> None:
    rolled = outcome(lambda x: np.roll(x, 1, axis=-1), Limits(0.01, 0.93, measured=True))
    assert "at least 78.3 %" in (rolled.fault() or "")
    noisy = outcome(lambda x: x + np.float32(0.02), Limits(0.01, 0.93, measured=True))
    assert noisy.fault() is None


def test_limits_are_those_of_the_bundle(exported: Path) -> None:
    bundle = Bundle.open(exported)
    ones = [Prompt([1], [], [(np.array([1, 2]), np.array([3.0, -4.0], np.float32))])]
    size = 12.5**0.5

    def limits(precision: str, exact: bool = False) -> Limits:
        return gate.limits_of(bundle, ones, precision, exact)

    assert limits("fp32", exact=True) == Limits(pytest.approx(1e-3 * size), 0.97)
    assert limits("fp32") == limits("fp16", exact=True) == Limits(pytest.approx(0.02 * size), 0.97)
    for recorded, expected in (
        (None, 0.9),
        ({"gate": {"top1_agreement": 93.5}}, 0.935),
        ({"gate": {"top1_agreement": "all"}}, 0.9),
        ({"gate": []}, 0.9),
    ):
        bundle.manifest["quantization"] = recorded
        assert limits("int8") == Limits(pytest.approx(0.02 * size), expected, measured=True)
    ones[0].top[0][1][:] = 1000
    assert limits("fp16").tolerance == 0.25


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r.clear(),
        lambda r: r.update(prompts=[]),
        lambda r: r["prompts"][0].update(ids=[]),
        lambda r: r["prompts"][0].update(ids=[1 << 40]),
        lambda r: r["prompts"][0].update(ids="abc"),
        lambda r: r["prompts"][0].update(greedy=[1]),
        lambda r: r["prompts"][0]["top"][0].clear(),
        lambda r: r["prompts"][0]["top"].pop(),
        lambda r: r["prompts"][0]["top"][0].append([1]),
        lambda r: r["prompts"][0]["top"][0].append([1, float("nan")]),
        lambda r: r["prompts"][0]["top"][0].append([-1, 0.0]),
        lambda r: r["prompts"][0]["top"][0].append(["x", 0.0]),
    ],
)
def test_damaged_reference_outputs(bundle: Path, damage: Callable[[Any], object]) -> None:
    record = json.loads((bundle / "reference.json").read_text())
    damage(record)
    (bundle / "reference.json").write_text(json.dumps(record))
    bundles.write_manifest(bundle, json.loads((bundle / "manifest.json").read_text()))
    with pytest.raises(BadInput, match=r"reference\.json: not as `edgepool export` writes it"):
        gate.prompts_of(Bundle.open(bundle))


def test_no_reference_outputs(bundle: Path) -> None:
    manifest = {**json.loads((bundle / "manifest.json").read_text()), "reference": None}
    bundles.write_manifest(bundle, manifest)
    with pytest.raises(BadInput, match="records no reference outputs"):
        gate.prompts_of(Bundle.open(bundle))
