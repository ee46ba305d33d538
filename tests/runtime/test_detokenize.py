"""Streaming text against the library's own decoding of all tokens."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgepool.runtime.detokenize import TextStream
from edgepool.runtime.tokenizer import Tokenizer

from .fakes import byte_fallback_json, byte_level_json, config

TOKENIZERS = {
    "byte level": Tokenizer(byte_level_json(), config(), "test"),
    "byte fallback": Tokenizer(byte_fallback_json(), config(vocab_size=400), "test"),
}
EMOJI = "👩‍👩‍👧‍👦🏳️‍🌈👍🏽 🇨🇭é"  # joined, variation, skin tone, flag, combining accent
TEXT = st.text() | st.text(EMOJI + " ▁aé中", max_size=20)


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    streamed = [stream.push(t) for t in token_ids]
    return [*streamed, stream.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXT)
@example(text=EMOJI)
@example(text="  two spaces first, a � of its own")
@example(text="�")
@settings(max_examples=200, deadline=None)
def test_streamed_text_is_the_decoded_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(text)
    streamed = pieces(tokenizer, token_ids)
    assert "".join(streamed) == tokenizer.decode(token_ids)
    if "�" not in text:
        assert not any("�" in piece for piece in streamed)
    assert streamed[-1] == ""  # a whole text leaves nothing behind


@given(st.lists(st.integers(0, 319), max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_tokens_of_byte_level(token_ids: list[int]) -> None:
    """Random bytes too: invalid parts become U+FFFD exactly as in the library."""
    tokenizer = TOKENIZERS["byte level"]
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    token_ids = tokenizer.encode("a👍b")
    assert [p for p in pieces(tokenizer, token_ids) if p] == ["a", "👍", "b"]
    assert len(token_ids) == 1 + 1 + 4 + 1


def test_text_that_ends_inside_a_character() -> None:
    tokenizer = TOKENIZERS["byte level"]
    token_ids = tokenizer.encode("x👍")[:-1]
    assert "".join(pieces(tokenizer, token_ids)[:-1]) == "x"
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_special_and_padding_tokens_print_nothing() -> None:
    tokenizer = TOKENIZERS["byte level"]
    assert pieces(tokenizer, [0, 319, *tokenizer.encode("hi"), 0])[:2] == ["", ""]
    assert "".join(pieces(tokenizer, [0, *tokenizer.encode("hi"), 0])) == "hi"


def test_the_first_word_loses_its_space_even_after_a_special_token() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    token_ids = [1, *tokenizer.encode("the fox")]
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids) == "the fox"


def test_the_work_per_token_does_not_grow() -> None:
    """Even for bytes that never make a character, where decoding a window again would be O(n^2)."""
    tokenizer = TOKENIZERS["byte level"]
    token_ids = [t for t in range(310) if tokenizer.token_bytes(t, first=False) == b"\x80"] * 20000
    stream = TextStream(tokenizer)
    started = time.perf_counter()
    text = "".join(map(stream.push, token_ids)) + stream.finish()
    assert time.perf_counter() - started < 1
    assert text == "�" * 20000
