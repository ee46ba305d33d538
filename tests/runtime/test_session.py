"""The bookkeeping of a session, on a backend that notices every mistake."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepool.errors import BadInput

from .fakes import config, fake_session

CONFIG = config()
IDS = [int(t) for t in np.random.default_rng(0).integers(0, CONFIG.vocab_size, 64)]


def one_shot(ids: list[int]) -> np.ndarray:
    """Logits of every token, from one step."""
    return fake_session(CONFIG, chunk=64).feed([ids], [range(len(ids))])[0]


ALL = one_shot(IDS)


@given(cuts=st.lists(st.integers(0, 64), max_size=6), chunk=st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_any_split_gives_the_same_logits(cuts: list[int], chunk: int) -> None:
    session = fake_session(CONFIG, chunk=chunk)
    edges = [0, *sorted(cuts), 64]
    for start, end in zip(edges, edges[1:]):
        logits = session.feed([IDS[start:end]], [range(end - start)])
        np.testing.assert_array_equal(logits[0], ALL[start:end])
    assert session.lengths.tolist() == session.past_len.tolist() == [64]


@given(lengths=st.lists(st.integers(0, 20), min_size=3, max_size=3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_ragged_batches(lengths: list[int], data: st.DataObject) -> None:
    """Each sequence of a batch gets what it would get alone; an empty one gets NaN."""
    session = fake_session(CONFIG, batch=3, chunk=data.draw(st.integers(1, 25)))
    starts = [7, 11, 30]
    for _ in range(2):
        texts = [IDS[s : s + n] for s, n in zip(starts, lengths)]
        before = session.lengths.tolist()
        logits = session.feed(texts)
        for b, (text, held) in enumerate(zip(texts, before)):
            if not text:
                assert np.isnan(logits[b]).all()
                continue
            whole = [int(t) for t in session.token_ids[b, : held + len(text)]]
            assert whole[held:] == text
            np.testing.assert_array_equal(logits[b, 0], one_shot(whole)[-1])


@pytest.mark.parametrize("back", range(25))
def test_rollback_and_replay(back: int) -> None:
    session = fake_session(CONFIG, batch=2)
    session.feed([IDS[:50], IDS[3:40]])
    session.rollback([50 - back, 37])
    assert session.lengths.tolist() == [50 - back, 37]
    assert (session.past_len % CONFIG.index.ratio == [0 if back else 2, 1]).all()
    logits = session.feed([[5, 6], []])
    np.testing.assert_array_equal(logits[0, 0], one_shot([*IDS[: 50 - back], 5, 6])[-1])
    logits = session.feed([IDS[:0], [9]])
    np.testing.assert_array_equal(logits[1, 0], one_shot([*IDS[3:40], 9])[-1])


def test_rollback_twice_before_replay() -> None:
    session = fake_session(CONFIG)
    session.feed([IDS[:30]])
    session.rollback([27])
    session.rollback([26])
    logits = session.feed([[1]])
    np.testing.assert_array_equal(logits[0, 0], one_shot([*IDS[:26], 1])[-1])


def test_rollback_to_nothing_starts_afresh() -> None:
    session = fake_session(CONFIG)
    session.feed([IDS[:30]])
    session.rollback([0])
    np.testing.assert_array_equal(session.feed([IDS[:9]])[0, 0], ALL[8])


def test_without_pools_a_rollback_feeds_nothing_again() -> None:
    session = fake_session(config(layer_types=("full", "full")))
    session.feed([IDS[:30]])
    session.rollback([27])
    assert session.past_len.tolist() == [27]


def test_rows_are_counted_from_the_new_tokens() -> None:
    session = fake_session(CONFIG, batch=2, chunk=4)
    session.feed([IDS[:5], IDS[:6]])
    session.rollback([3, 6])  # pending tokens of a rollback are not new
    logits = session.feed([IDS[3:20], IDS[6:20]], [[0, 9], [13, 2]])
    np.testing.assert_array_equal(logits[0], ALL[[3, 12]])
    np.testing.assert_array_equal(logits[1], ALL[[19, 8]])


def test_steps_are_as_wide_as_needed() -> None:
    """Chunks of at most `chunk`, and a page table only as wide as the pages in use."""
    session = fake_session(CONFIG, chunk=10)
    session.feed([IDS[:25]])
    session.feed([IDS[25:26]])
    steps = [(int(new[0]), shape) for new, shape in session._backend.steps]
    assert steps == [(10, (1, 2)), (10, (1, 3)), (5, (1, 4)), (1, (1, 4))]


def test_an_interrupted_step_leaves_the_session_as_it_was() -> None:
    session = fake_session(CONFIG, chunk=7)
    session.feed([IDS[:22]])
    session._backend.fail_at = len(session._backend.steps) + 2
    with pytest.raises(KeyboardInterrupt):
        session.feed([IDS[30:60]])
    assert session.lengths.tolist() == [22]
    session._backend.fail_at = None
    np.testing.assert_array_equal(session.feed([IDS[22:40]])[0, 0], ALL[39])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1] * 65], "sequence 0 would hold 65 tokens, but the session was opened for 64"),
        ([[320]], "token 320 is not in the vocabulary of 320"),
        ([[3, -1]], "token -1 is not in the vocabulary of 320"),
        ([[1], [2]], "tokens for 2 sequences, but the session has 1"),
    ],
)
def test_refuses_bad_tokens(tokens: list[list[int]], message: str) -> None:
    session = fake_session(CONFIG)
    with pytest.raises(BadInput, match=message):
        session.feed(tokens)
    assert session.lengths.tolist() == [0]


def test_refuses_a_rollback_forward() -> None:
    session = fake_session(CONFIG)
    session.feed([IDS[:4]])
    with pytest.raises(BadInput, match="the session holds"):
        session.rollback([5])
