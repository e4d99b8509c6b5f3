"""Room for what waits, shared by tenants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.queue_limits import OVERHEAD, Reservation, Room
from headway.model import Entry

MOST = 1_000_000


def entry(tenant: str, input: str = "x" * 9_000, parameters: bytes = b"") -> Entry:
    return Entry("id", "m", input, 0, tenant, "g", 1.0, 1.0, parameters)


def fill(room: Room, tenant: str) -> list[Reservation]:
    reservations = []
    while (reservation := room.take(entry(tenant))) is not None:
        reservations.append(reservation)
    return reservations


@pytest.mark.parametrize("tenants", [2, 3, 9])
def test_however_many_take_all_they_can_there_is_room_for_one_more(tenants: int) -> None:
    room = Room(MOST)
    used = {tenant: fill(room, str(tenant)) for tenant in range(tenants)}
    for _ in range(30):  # Until nobody gets any more: who came first gives back what it has, and takes what it gets.
        for tenant in range(tenants):
            used[tenant].clear()
            used[tenant] = fill(room, str(tenant))
    assert min(map(len, used.values())) >= 100 // (tenants + 1) - 1
    assert room.take(entry("another")) is not None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300_000), st.booleans()), max_size=50))
def test_all_that_was_taken_comes_back(steps: list[tuple[str, int, bool]]) -> None:
    room, reservations = Room(MOST), list[Reservation]()
    for tenant, length, leaves in steps:
        if leaves:
            del reservations[:1]
        reservations += filter(None, [room.take(entry(tenant, "x" * length))])
        assert 0 <= room.free <= MOST
    reservations.clear()
    assert (room.free, room._used) == (MOST, {})


def test_an_entry_counts_with_all_that_it_holds_and_a_tenant_may_hold_all_that_is_free() -> None:
    room = Room(MOST)
    reservations = [room.take(entry("t", "x" * 3000, b"y" * 50)), room.take(entry("t", "☃" * 3000))]
    assert None not in reservations
    assert room.free == MOST - 2 * OVERHEAD - 3050 - 12_000
    assert Room(OVERHEAD + 9_000).take(entry("t")) is not None
    assert Room(OVERHEAD + 8_999).take(entry("t")) is None
