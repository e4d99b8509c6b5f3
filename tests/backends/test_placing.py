"""Large values in and out of an arena, without a process. The child's claims are checked before they are trusted."""

import mmap
from collections.abc import Iterator
from typing import Any

import pytest

from headway.backends.process.arena import LARGE, Arena, place_inputs, place_outputs, take_inputs, take_outputs
from headway.backends.process.frames import NoFrame, Outputs, Run
from headway.core.arena import Place
from headway.model import Octets, ValueKind

SIZE = 1 << 20


def count(direction: str, by_arena: bool) -> None:
    """Ignore the counts."""


@pytest.fixture
def arena() -> Arena:
    return Arena(mmap.mmap(-1, SIZE))


def done(steps: Iterator[int]) -> None:
    for _ in steps:
        pass


def asked(arena: Arena, *inputs: Any, number: int = 7) -> Run:
    run = Run(number, list(inputs))
    done(place_inputs(arena, run, count))
    return run


def test_what_is_placed_is_taken_out_as_it_was(arena: Arena) -> None:
    values = ["small", "x" * LARGE, "é" * LARGE, b"[" + b"1," * LARGE + b"1]", "", Octets(b"\xff" * LARGE)]
    run = asked(arena, *values)
    assert run.inputs == ["small", None, None, None, "", None]
    take_inputs(arena, run, lend=False)
    assert run.inputs == values
    errors = dict.fromkeys((3, 5), ("no", False))
    word = Outputs(7, ValueKind.TEXT, [one if isinstance(one, str) else None for one in values], errors)
    place_outputs(arena, run, word)
    assert [one is None for one in word.outputs] == [False, True, True, True, False, True]
    done(take_outputs(arena, run, word, count))
    assert word.outputs == ["small", "x" * LARGE, "é" * LARGE, None, "", None]


def test_an_output_is_copied_in_one_step_and_read_in_the_next_as_it_was_then(arena: Arena) -> None:
    """Doing both in one step would block the event loop twice as long."""
    run = asked(arena, "a")
    place_outputs(arena, run, word := Outputs(7, ValueKind.TEXT, ["x" * LARGE], {}))
    steps = take_outputs(arena, run, word, count)
    next(steps)
    assert word.outputs == [None]
    arena.write(word.placed[0], b"y" * LARGE)
    next(steps)
    assert word.outputs == ["x" * LARGE]


def test_octets_are_lent_until_they_are_taken_back(arena: Arena) -> None:
    run = asked(arena, Octets(b"ab" * LARGE))
    take_inputs(arena, run, lend=True)
    [lent] = run.inputs
    assert isinstance(lent, Octets)
    view = memoryview(lent.content)
    assert (view.readonly, bytes(view[:4])) == (True, b"abab")
    assert not arena.take_back(), "something that was made of it is there"
    view.release()
    take_inputs(arena, run := asked(arena, Octets(b"cd" * LARGE)), lend=True)
    [lent] = run.inputs
    assert isinstance(lent, Octets)
    assert arena.take_back()
    with pytest.raises(ValueError, match="released"):
        len(lent)


def test_outputs_do_not_lie_on_inputs_and_the_next_batch_takes_the_same_memory(arena: Arena) -> None:
    run = asked(arena, "x" * LARGE)
    assert run.placed[0].place == Place(0, LARGE, 7)
    place_outputs(arena, run, word := Outputs(7, ValueKind.JSON, [b"y" * LARGE], {}))
    assert word.outputs == [None]
    take_inputs(arena, run, lend=False)
    assert run.inputs == ["x" * LARGE]
    done(take_outputs(arena, run, word, count))
    assert word.outputs == [b"y" * LARGE]
    assert asked(arena, "y" * LARGE, number=8).placed[0].place == Place(0, LARGE, 8)


LIES = {
    "offset beyond the end": (Place(SIZE, 1, 7), 0),
    "offset in the inputs": (Place(0, 10, 7), 0),
    "negative offset": (Place(-64, 10, 7), 0),
    "length beyond the end": (Place(LARGE, SIZE, 7), 0),
    "negative length": (Place(LARGE + 64, -10, 7), 0),
    "huge numbers": (Place(1 << 63, 1 << 63, 7), 0),
    "another batch": (Place(LARGE, 10, 6), 0),
    "position beyond the batch": (Place(LARGE, 10, 7), 2),
    "negative position": (Place(LARGE, 10, 7), -1),
    "position of an output that is there": (Place(LARGE, 10, 7), 1),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_place_that_cannot_be_is_not_believed(arena: Arena, lie: str) -> None:
    place, position = LIES[lie]
    run = asked(arena, "x" * LARGE, "other")
    for kind, there in ((ValueKind.TEXT, "there"), (ValueKind.JSON, b"1")):
        with pytest.raises(NoFrame):
            done(take_outputs(arena, run, Outputs(7, kind, [None, there], {}, placed={position: place}), count))


def test_places_of_which_others_or_no_memory_say_otherwise_are_not_believed(arena: Arena) -> None:
    whole, empty, small = Place(0, SIZE, 7), Place(LARGE, 0, 7), Place(0, 10, 7)
    arena.write(small, b"\xff" * 10)
    for within, kind, outputs, places in (
        (arena, ValueKind.JSON, 2, [whole, whole]),  # They overlap.
        (arena, ValueKind.BYTES, 2, [empty] * 3),  # There are more places than outputs.
        (arena, ValueKind.TEXT, 1, [small]),  # It isn't valid UTF-8.
        (None, ValueKind.JSON, 1, [small]),
    ):
        word = Outputs(7, kind, [None] * outputs, {}, placed=dict(enumerate(places)))
        with pytest.raises(NoFrame):
            done(take_outputs(within, asked(arena, *"ab"[:outputs]), word, count))


@pytest.mark.parametrize(("kind", "other"), [(ValueKind.TEXT, b"1"), (ValueKind.JSON, "1"), (ValueKind.BYTES, "1")])
def test_outputs_of_another_kind_than_they_say_are_told_from_others(kind: ValueKind, other: str | bytes) -> None:
    proper = "1" if isinstance(other, bytes) else b"1"
    assert Outputs(7, kind, [None, proper], {}).are_of_kind
    assert not Outputs(7, kind, [proper, other], {}).are_of_kind


def test_large_outputs_that_found_no_room_are_counted_once_each(arena: Arena) -> None:
    counted: list[tuple[str, bool]] = []
    run = asked(arena, "a", "b")
    word = Outputs(7, ValueKind.TEXT, ["x" * SIZE, "y" * SIZE], {})
    place_outputs(arena, run, word)
    word.unplaced += 1 << 40  # A child may claim anything.
    done(take_outputs(arena, run, word, lambda direction, by_arena: counted.append((direction, by_arena))))
    assert counted == [("out", True), ("out", False), ("out", False)]


def test_the_host_moves_one_value_at_a_step(arena: Arena) -> None:
    run = Run(7, ["x" * LARGE, "small", "y" * LARGE, "z" * LARGE])
    assert [run.inputs.count(None) for _ in place_inputs(arena, run, count)] == [1, 2, 3]
    word = Outputs(7, ValueKind.TEXT, ["x" * LARGE, "small", "y" * LARGE, "z" * LARGE], {})
    place_outputs(arena, run, word)
    assert [word.outputs.count(None) for _ in take_outputs(arena, run, word, count)] == [3, 2, 2, 1, 1, 0]
