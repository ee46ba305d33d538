"""Stop strings, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepool.errors import BadInput
from edgepool.runtime.stop import StopStrings

TEXT = st.text("ab\n", max_size=12)


def truncated(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: grow the text letter by letter until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        matched = [s for s in stops if text[:end].endswith(s)]
        if matched:
            return text[: end - max(map(len, matched))], True
    return text, False


@given(st.lists(TEXT, max_size=8), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_any_cut_gives_the_definition(pieces: list[str], stops: list[str]) -> None:
    expected, found = truncated("".join(pieces), stops)
    filtered = StopStrings(stops)
    printed = ""
    for piece in pieces:
        printed += filtered.push(piece)
        assert expected.startswith(printed)  # nothing of a stop string was ever printed
    printed += filtered.finish()
    assert (printed, filtered.found) == (expected, found)


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=4))
def test_holds_back_no_more_than_it_must(text: str, stop: str) -> None:
    filtered = StopStrings([stop])
    printed = filtered.push(text)
    if not filtered.found:
        held = text[len(printed) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)


def test_refuses_an_empty_string() -> None:
    with pytest.raises(BadInput, match="empty stop string"):
        StopStrings(["a", ""])
