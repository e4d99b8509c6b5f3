"""Places in an arena are inside it and don't overlap; invalid ones are detected."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.arena import ALIGNMENT, Allocator, Place, sound

LENGTHS = st.lists(st.integers(0, 150), max_size=8)
SIZES = st.integers(0, 1500)


def taken(allocator: Allocator, lengths: list[int]) -> list[Place]:
    return [place for length in lengths if (place := allocator.take(length)) is not None]


@given(SIZES, LENGTHS, LENGTHS)
def test_inputs_and_outputs_lie_apart_within_the_arena(size: int, inputs: list[int], outputs: list[int]) -> None:
    host = Allocator(size, 7)
    first = taken(host, inputs)
    worker = Allocator(size, 7, host.used)
    second = taken(worker, outputs)
    covered = [byte for place in first + second for byte in range(place.offset, place.end)]
    assert len(covered) == len(set(covered))
    assert all(0 <= byte < size for byte in covered)
    assert all(place.offset % ALIGNMENT == 0 for place in first + second)
    assert sound(first, size, 7, 0)
    assert sound(second, size, 7, host.used)


@given(SIZES, LENGTHS)
def test_what_was_refused_has_no_room_and_what_is_smaller_may_still_have(size: int, lengths: list[int]) -> None:
    allocator = Allocator(size, 1)
    for length in lengths:
        before = allocator.used
        if allocator.take(length) is None:
            assert before + length + ALIGNMENT > size
            assert allocator.used == before


PLACES = st.lists(st.builds(Place, st.integers(-10, 300), st.integers(-10, 300), st.integers(6, 8)), max_size=4)


@given(PLACES, st.integers(0, 200))
def test_sound_places_are_those_that_can_be_read_without_harm(places: list[Place], used: int) -> None:
    end, good = used, True
    for place in places:
        good = good and place.generation == 7 and place.length >= 0 and end <= place.offset and place.end <= 256
        end = place.end
    assert sound(places, 256, 7, used) == good


def test_a_place_travels_as_three_numbers() -> None:
    assert msgspec.msgpack.encode(Place(1, 2, 3)) == b"\x93\x01\x02\x03"
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([1, 2.5, 3]), type=Place)
