"""What is taken where the wish does not fit, and what is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepool.board.fit import Choice, Model, Room, fitting, nothing_fits, smaller
from edgepool.engine.memory import GIB
from edgepool.errors import MissingRequirement
from edgepool.model.presets import PRESETS
from edgepool.targets import find_target

CONFIG = PRESETS["edgepool-12l"]
ORIN = find_target("jetson-agx-orin")
BOTH = Model(lambda precision: CONFIG, ("fp16", "int8"), "fp16", ORIN)
WISH = Choice("fp16", CONFIG.max_context, 4)


def settled(free: float, adapt: bool = True, wish: Choice = WISH) -> tuple[Choice, list[str]]:
    said: list[str] = []
    room = Room(int(free * GIB), int(free * GIB))
    choice = next(fitting(BOTH, wish, lambda _: room, adapt, said.append), None)
    if choice is None:
        raise nothing_fits(BOTH, wish, lambda _: room, adapt)
    return choice, said


def test_the_order_is_int8_then_context_then_batch() -> None:
    ladder = list(smaller(BOTH, Choice("fp16", 5000, 3)))
    assert ladder == [
        Choice("int8", 5000, 3),
        Choice("int8", 2500, 3),
        Choice("int8", 1250, 3),
        Choice("int8", 1024, 3),
        Choice("int8", 1024, 1),
    ]
    assert list(smaller(BOTH, Choice("int8", 800, 1))) == []


def test_what_fits_is_taken_as_it_is() -> None:
    assert settled(1000) == (WISH, [])


@given(st.floats(1, 40))
def test_the_first_that_fits_is_taken_and_every_step_is_said(free: float) -> None:
    def fits(choice: Choice) -> bool:
        need = BOTH.needs(choice)
        return max(need.total, need.build_peak) <= int(free * GIB)

    ladder = [WISH, *smaller(BOTH, WISH)]
    expected = next((choice for choice in ladder if fits(choice)), None)
    if expected is None:
        with pytest.raises(MissingRequirement, match="INT8 for 1024 tokens takes .* close other"):
            settled(free)
        return
    choice, said = settled(free)
    assert choice == expected
    assert [text.split(": trying ")[1] for text in said] == [
        str(step) for step in ladder[1 : ladder.index(expected) + 1]
    ]


def test_a_caller_can_come_back_for_a_smaller_choice() -> None:
    """As it does when a build was ended all the same."""
    room = Room(1000 * GIB, 1000 * GIB)
    every = list(fitting(BOTH, WISH, lambda _: room, True, lambda text: None))
    assert every == [WISH, *smaller(BOTH, WISH)]
    assert list(fitting(BOTH, WISH, lambda _: room, False, lambda text: None)) == [WISH]


def test_an_engine_that_is_there_needs_no_room_to_build() -> None:
    need = BOTH.needs(WISH)
    between = (need.total + need.build_peak) // 2
    assert Room(between, None).holds(need)
    assert not Room(between, between).holds(need)


def test_what_to_ask_less_of_without_adapt() -> None:
    wish = Choice("fp16", CONFIG.max_context, 1)
    free = (BOTH.needs(Choice("int8", wish.context, 1)).build_peak + 1) / GIB
    assert free * GIB < BOTH.needs(wish).build_peak
    with pytest.raises(MissingRequirement) as caught:
        settled(free, adapt=False, wish=wish)
    message = str(caught.value)
    for words in ("FP16 for", "to build", "close other programs", "--precision int8", "--adapt"):
        assert words in message
    with pytest.raises(MissingRequirement, match="can be used: close other programs"):
        settled(0, adapt=False, wish=wish)
