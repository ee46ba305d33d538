"""What the user asked for, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional, Sequence

from ..bundle import Bundle
from ..engine.line import OK, WRONG, Line
from ..engine.memory import GIB
from ..engine.plan import check_sizes
from ..errors import BadInput
from ..runtime.session import Session
from .fit import Choice, Model, Room

DEFAULTS = ("fp16", "fp32", "int8")  # the precision if none is asked for: the first there is

Tell = Callable[[Line], None]


@dataclass(frozen=True)
class Wish:
    """What the user asked for; None: what the bundle has.

    backend  `trt` or `ort`; adapt: take less where it does not fit
    """

    bundle: Path
    backend: str = "trt"
    precision: Optional[str] = None
    context: Optional[int] = None
    batch: int = 1
    adapt: bool = False
    threads: int = 0


@dataclass(frozen=True)
class Opened:
    """A session of a choice. file: the graph or engine that it runs; exact: it computes in FP32
    where the graph says so."""

    choice: Choice
    file: str
    session: Session
    exact: bool


def first_choice(bundle: Bundle, precisions: Sequence[str], wish: Wish) -> Choice:
    """What was asked for, and for the rest the bundle's own float type and whole context.

    Raises BadInput for what the bundle does not have.
    """
    precision = wish.precision
    if precision is None:
        precision = next(p for p in DEFAULTS if p in precisions)
    if precision not in precisions:
        raise BadInput(
            "%s: no graph in %s for this machine: choose %s"
            % (bundle.path, precision.upper(), " or ".join(precisions))
        )
    context = bundle.config.max_context if wish.context is None else wish.context
    check_sizes(bundle.config, context, wish.batch)
    return Choice(precision, context, wish.batch)


def tell_of_less(tell: Tell) -> Callable[[str], None]:
    """Tells what does not fit, and what is tried instead."""
    return lambda text: tell(Line("room", WRONG, text))


def tell_of_room(model: Model, choice: Choice, room: Room, tell: Tell) -> None:
    """Tell that a choice fits."""
    sizes = (choice, model.needs(choice).total / GIB, room.running / GIB)
    tell(Line("room", OK, "%s takes %.1f GiB, %.1f GiB can be used" % sizes))
