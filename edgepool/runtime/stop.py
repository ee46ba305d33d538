"""Stop strings in streamed text: nothing of one is ever printed."""

from __future__ import annotations

from typing import Sequence

from ..errors import BadInput


class StopStrings:
    """Passes text through until a stop string is complete; what may be the start of one waits.

    The stop string that is complete first ends the text (of several, the one that begins first), so
    the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise BadInput("stop: an empty stop string would stop before the first token")
        self._strings = tuple(strings)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The part of the text so far that is new and safe to print."""
        if self.found:
            return ""
        text = self._held + text
        ends = [(text.find(s) + len(s), -len(s)) for s in self._strings if s in text]
        if ends:
            end, negative_length = min(ends)
            self.found, self._held = True, ""
            return text[: end + negative_length]
        safe = len(text) - max((_overlap(text, s) for s in self._strings), default=0)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` that is a beginning of `string`."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
