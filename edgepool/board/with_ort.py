"""A session of ONNX Runtime on the CPU, which runs the portable graphs as they are."""

from __future__ import annotations

from pathlib import Path

from ..bundle import GRAPHS, MODEL, Bundle
from ..engine.memory import RESERVE, available
from ..runtime import ort_session
from ..targets import find_target
from .fit import Model, Room, fitting, nothing_fits
from .wish import Opened, Tell, Wish, first_choice, tell_of_less, tell_of_room


def open_session(bundle: Bundle, wish: Wish, tell: Tell, root: Path) -> Opened:
    """Raises MissingRequirement for what does not fit, BadInput for what the bundle has not."""
    graphs = {"int8": GRAPHS["int8"], bundle.manifest["dtype"]: MODEL}
    precisions = [p for p, name in graphs.items() if name in bundle.manifest["files"]]
    model = Model(bundle.config_of, precisions, bundle.manifest["dtype"], find_target("cpu"))
    first = first_choice(bundle, precisions, wish)
    room = Room(available(root) - RESERVE, None)
    choice = next(fitting(model, first, lambda _: room, wish.adapt, tell_of_less(tell)), None)
    if choice is None:
        raise nothing_fits(model, first, lambda _: room, wish.adapt)
    tell_of_room(model, choice, room, tell)
    session = ort_session.open_session(
        bundle.file(graphs[choice.precision]),
        bundle.config_of(choice.precision),
        batch=choice.batch,
        capacity=choice.context,
        threads=wish.threads,
    )
    return Opened(choice, graphs[choice.precision], session, exact=True)
