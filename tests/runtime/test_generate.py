"""The generation loop on the fake model: what is printed, what is counted, what ends it."""

from __future__ import annotations

import pytest

from edgepool.errors import BadInput
from edgepool.runtime.generate import generate
from edgepool.runtime.sampling import Sampling
from edgepool.runtime.tokenizer import Tokenizer

from .fakes import byte_level_json, config, fake_session

CONFIG = config(eos_token_ids=(0,))
TOKENIZER = Tokenizer(byte_level_json(), CONFIG, "test")
PROMPT = TOKENIZER.encode("The quick brown fox and the other")
SAMPLING = Sampling(temperature=1.0, seed=11)


def run(prompt_ids=PROMPT, **options):
    options = {"sampling": SAMPLING, "max_new_tokens": 20, **options}
    session = options.pop("session", None) or fake_session(CONFIG, capacity=128, chunk=8)
    pieces: list[str] = []
    result = generate(session, TOKENIZER, prompt_ids, on_text=pieces.append, **options)
    assert "".join(pieces) == result.text
    return result


def test_counts_and_text() -> None:
    result = run()
    assert len(result.token_ids) == 20
    assert result.finish_reason == "length"
    assert result.prompt_tokens == len(PROMPT)
    assert result.text == TOKENIZER.decode(result.token_ids)
    assert result.prefill_tokens_per_s > 0
    assert result.decode_tokens_per_s == pytest.approx(19 / result.decode_seconds)
    assert 0 < result.attended_fraction < 1


def test_greedy_is_the_argmax_of_the_model() -> None:
    result = run(sampling=Sampling(), max_new_tokens=5)
    session = fake_session(CONFIG, capacity=128, chunk=128)
    tokens = list(PROMPT)
    for token in result.token_ids:
        logits = session.feed([tokens])[0, 0]
        assert token == logits.argmax()
        session.rollback([0])
        tokens.append(token)


def test_the_last_token_is_not_fed() -> None:
    session = fake_session(CONFIG, capacity=128)
    run(session=session)
    assert session.lengths.tolist() == [len(PROMPT) + 19]


def test_end_of_text_token_ends_it() -> None:
    everything = run(max_new_tokens=40).token_ids
    eos = everything[7]
    ends = config(eos_token_ids=(5, eos))
    result = run(session=fake_session(ends, capacity=128, chunk=8))
    first = everything.index(eos)
    assert result.token_ids == everything[: first + 1]
    assert result.finish_reason == "stop"
    assert result.text == TOKENIZER.decode(everything[:first])


def test_stop_string_over_several_tokens() -> None:
    text = run().text
    stop = text[6:10]
    result = run(stop=["never", stop])
    assert result.text == text[: text.index(stop)]
    assert result.finish_reason == "stop"
    assert len(result.token_ids) < 20


def test_what_a_stop_string_held_back_comes_at_the_end() -> None:
    text = run().text
    assert run(stop=[text[-3:] + "more"]).text == text


def test_a_full_context_ends_it() -> None:
    session = fake_session(CONFIG, capacity=len(PROMPT) + 3)
    result = run(session=session)
    assert result.finish_reason == "context"
    assert len(result.token_ids) == 4  # the last needs no room


def test_one_token_has_no_decode_speed() -> None:
    result = run(max_new_tokens=1)
    assert result.decode_tokens_per_s is None


def test_a_second_turn_continues_the_session() -> None:
    session = fake_session(CONFIG, capacity=128, chunk=8)
    first = run(session=session, max_new_tokens=4)
    more = [first.token_ids[-1], *TOKENIZER.encode(" and")]
    second = run(more, session=session, max_new_tokens=6)
    whole = run([*PROMPT, *first.token_ids, *more[1:]], max_new_tokens=6)
    assert second.token_ids == whole.token_ids
    assert second.attended_fraction == whole.attended_fraction


def test_progress_of_a_long_prompt() -> None:
    reports: list[tuple[str, int, int]] = []
    run(report=lambda *report: reports.append(report))
    assert [r[1] for r in reports] == [*range(8, len(PROMPT), 8), len(PROMPT)]
    assert {r[2] for r in reports} == {len(PROMPT)}


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "no tokens"),
        ([1] * 129, {}, "has 129 tokens, but the context has room for 128"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens: 0"),
        ([1], {"stop": [""]}, "empty stop string"),
    ],
)
def test_refuses(prompt: list[int], options: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run(prompt, **options)
