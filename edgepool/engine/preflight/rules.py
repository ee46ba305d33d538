"""What a rule is, and the table of them.

A rule is one function that yields (where, what) for every place of a model that breaks it, and that
yields nothing for a reader that does not mind. Ids never change and are never used again.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, Tuple

from .graph import Model
from .reader import Reader

ERROR, WARNING = "error", "warning"
Places = Iterator[Tuple[str, str]]
Check = Callable[[Model, Reader], Places]


@dataclass(frozen=True)
class Rule:
    """id, severity (ERROR: it will not build, or computes something else), title and remedy."""

    id: str
    severity: str
    title: str
    remedy: str
    check: Check


_rules: Dict[str, Rule] = {}


def rule(id: str, severity: str, title: str, remedy: str) -> Callable[[Check], Check]:
    """Register the decorated function as a rule."""

    def register(check: Check) -> Check:
        if id in _rules:
            raise ValueError("rule %s exists twice" % id)
        _rules[id] = Rule(id, severity, title, remedy, check)
        return check

    return register


def rules() -> Dict[str, Rule]:
    """Every rule by id."""
    for module in ("operators", "quantization", "types", "shapes", "plugins"):
        importlib.import_module("%s.%s_rules" % (__package__, module))
    return dict(sorted(_rules.items()))
