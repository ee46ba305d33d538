"""Streaming detokenisation: text as soon as it is certain, and never half a character."""

from __future__ import annotations

import codecs

from .tokenizer import Tokenizer


class TextStream:
    """Turns one sequence's tokens into text, a token at a time.

    Tokens are added as bytes, and an incremental UTF-8 decoder keeps the bytes of a character that
    is not complete, so the work per token does not grow with the text. All pieces together are what
    `Tokenizer.decode` gives for all tokens. Bytes that are not UTF-8 become U+FFFD; in a run of
    byte-fallback tokens the library replaces the whole run, here only the invalid part is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._started = False

    def push(self, token_id: int) -> str:
        """The text that the token completes, often empty for a part of a character."""
        data = self._tokenizer.token_bytes(token_id, first=not self._started)
        self._started = self._started or token_id not in self._tokenizer.special_ids
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD if the text ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
