"""A line of a report about a machine."""

from __future__ import annotations

from dataclasses import dataclass

OK, MISSING, WRONG = "ok", "missing", "wrong"


@dataclass(frozen=True)
class Line:
    """state: OK, MISSING or WRONG; fix: what to do, for OK a hint or nothing; path: where it is."""

    name: str
    state: str
    found: str
    fix: str = ""
    path: str = ""
