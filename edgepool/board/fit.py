"""Does it fit? If not: what to ask less of, or, with `--adapt`, smaller choices that do.

FP16 -> INT8 -> shorter context -> smaller batch. The sizes are those of `edgepool plan`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Callable, Iterator, List, Optional, Sequence

from ..config import ModelConfig
from ..engine.footprint import Memory, Precision, memory
from ..engine.memory import GIB
from ..engine.plan import largest
from ..errors import MissingRequirement
from ..targets import Target

PRECISIONS = ("fp32", "fp16", "int8")  # each takes less than the one before
LEAST_CONTEXT = 1024  # tokens: a shorter one is of little use, a smaller batch comes first

Say = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """What is to run: batch sequences of `context` tokens each."""

    precision: str
    context: int
    batch: int

    def __str__(self) -> str:
        many = "%d x " % self.batch if self.batch > 1 else ""
        return "%s for %s%d tokens" % (self.precision.upper(), many, self.context)


@dataclass(frozen=True)
class Room:
    """Bytes that can be used: while running, and while an engine is built (None: not built)."""

    running: int
    building: Optional[int]

    def holds(self, need: Memory) -> bool:
        if self.building is not None and need.build_peak > self.building:
            return False
        return need.total <= self.running


@dataclass(frozen=True)
class Model:
    """What is to be fitted: its configuration per precision that the bundle has, and the target."""

    configs: Callable[[str], ModelConfig]
    precisions: Sequence[str]
    dtype: str
    target: Target

    def needs(self, choice: Choice) -> Memory:
        """Bytes of a choice by part."""
        int8 = choice.precision == "int8"
        itemsize = 2 if "fp16" in (choice.precision, self.dtype) else 4
        precision = Precision(choice.precision, itemsize, int8)
        config = self.configs(choice.precision)
        return memory(config, self.target, precision, choice.context, choice.batch)


def fitting(
    model: Model, wish: Choice, room_for: Callable[[Choice], Room], adapt: bool, say: Say
) -> Iterator[Choice]:
    """The wish if it fits; with adapt, then every one of `smaller` that does, for a caller to whom
    the first was still too large. room_for(choice) is what can be used for it.

    say is told what does not fit, and what comes next.
    """
    ladder = [wish, *(smaller(model, wish) if adapt else ())]
    for choice, following in zip(ladder, [*ladder[1:], None]):
        room = room_for(choice)
        if room.holds(model.needs(choice)):
            yield choice
        elif following is not None:
            say("%s: trying %s" % (too_much(model, choice, room), following))


def nothing_fits(
    model: Model,
    wish: Choice,
    room_for: Callable[[Choice], Room],
    adapt: bool,
    ended: Optional[Choice] = None,
) -> MissingRequirement:
    """The error that says what to change. ended: the last choice whose build memory ran out for."""
    choice = [wish, *(smaller(model, wish) if adapt else ())][-1]
    why = too_much(model, choice, room_for(choice))
    if ended is not None:
        why = "memory ran out while %s was built" % ended
    ways = ["close other programs", "stop the desktop (sudo init 3)"]
    if not adapt:
        ways += [*_less(model, wish, room_for(wish)), "let --adapt choose"]
    return MissingRequirement("%s: %s" % (why, ", or ".join(ways)))


def smaller(model: Model, wish: Choice) -> Iterator[Choice]:
    """What to try instead of a wish, in turn. Halves, so that a board comes to the same choice
    again, and to the engine it built, when a little more or less memory is free."""
    for precision in _below(model, wish.precision):
        wish = dataclasses.replace(wish, precision=precision)
        yield wish
    while wish.context > LEAST_CONTEXT:
        wish = dataclasses.replace(wish, context=max(LEAST_CONTEXT, wish.context // 2))
        yield wish
    while wish.batch > 1:
        wish = dataclasses.replace(wish, batch=wish.batch // 2)
        yield wish


def too_much(model: Model, choice: Choice, room: Room) -> str:
    """What a choice takes and what there is, in words."""
    need = model.needs(choice)
    parts = ["%.1f GiB to run" % (need.total / GIB)]
    free = room.running
    if room.building is not None:
        parts.insert(0, "%.1f GiB to build" % (need.build_peak / GIB))
        free = min(free, room.building)
    return "%s takes %s, and %.1f GiB can be used" % (
        choice,
        " and ".join(parts),
        max(0, free) / GIB,
    )


def _below(model: Model, precision: str) -> List[str]:
    """Precisions of the bundle that take less than one, in turn."""
    cheaper = PRECISIONS[PRECISIONS.index(precision) + 1 :]
    return [name for name in cheaper if name in model.precisions]


def _less(model: Model, wish: Choice, room: Room) -> List[str]:
    """Options that would make a wish fit."""

    def fits(choice: Choice) -> bool:
        return room.holds(model.needs(choice))

    cheaper = _below(model, wish.precision)
    ways = ["--precision %s" % p for p in cheaper if fits(dataclasses.replace(wish, precision=p))]
    context = largest(lambda n: fits(dataclasses.replace(wish, context=n)), wish.context - 1)
    return [*ways, "--context %d" % context] if context else ways
