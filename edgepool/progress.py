"""How a long job says how far it is; `edgepool.cli.console.progress` shows it."""

from __future__ import annotations

from typing import Callable

# report(step, done, total): `step` is a phrase for people; done == total ends it.
Report = Callable[[str, int, int], None]


def silent(step: str, done: int, total: int) -> None:
    """The report of a caller who does not want to know."""
