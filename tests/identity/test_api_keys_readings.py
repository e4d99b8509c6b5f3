"""Readings of the store by the cache: changes first and always, all keys apart, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from headway.config import Settings
from headway.errors import RequestError, StoreCorrupted, StoreUnavailable
from headway.identity.api_keys.cache import (
    AFRESH_EVERY,
    ANSWER_WITHIN,
    PAGE,
    RETIRE_EVERY,
    TRY_AGAIN,
    ApiKeyCache,
)
from headway.identity.api_keys.table import KeyTable
from headway.model import ApiKey
from headway.ports import KeyChanges, KeyMark
from headway.runtime.counters import StoreCounts
from tests.identity.store import StoreInMemory
from tests.identity.test_api_keys_cache import EPOCH, Scene, bearer, key, on_ring, played
from tests.identity.writing import id_of

BEAT = 1.01


def many(count: int) -> list[ApiKey]:
    return [msgspec.structs.replace(key("n"), id=f"{number:012}") for number in range(count)]


def test_a_revocation_is_seen_while_all_keys_cannot_be_read() -> None:
    async def scene(stage: Scene) -> None:
        stage.store.slow_from_start = True
        await asyncio.sleep(2 * AFRESH_EVERY)
        await stage.store.expire(id_of("a"), 0.0)
        await asyncio.sleep(BEAT)
        assert not stage.knows("a")
        assert stage.counters.keys_age == 0.0
        stage.store.slow_from_start = False
        stage.store.forget(id_of("b"))
        await asyncio.sleep(ANSWER_WITHIN + TRY_AGAIN + BEAT)
        assert not stage.knows("b")

    [line] = played(scene, key("a"), key("b"))
    assert (line["log_level"], line["event"]) == ("warning", "not all keys can be read again; their changes are")


def test_a_revision_that_is_used_again_after_a_failover_is_noticed_with_the_next_beat() -> None:
    async def scene(stage: Scene) -> None:
        before = [key("a"), key("b")]
        await stage.store.add(key("lost"))
        await asyncio.sleep(BEAT)
        assert stage.knows("lost")
        stage.store.restore(*before)
        await stage.store.expire(id_of("a"), 0.0)  # It gets the revision that the lost key had.
        await asyncio.sleep(BEAT)
        assert not stage.knows("a")
        assert not stage.knows("lost")
        assert stage.knows("b")

    [line] = played(scene, key("a"), key("b"))
    assert (line["log_level"], line["event"]) == (
        "warning",
        "the store of keys has another history than before; all keys are read again",
    )


@on_ring(key("a"), key("b"))
async def test_keys_are_as_old_as_the_last_reading_of_all_that_was_needed(stage: Scene) -> None:
    await asyncio.sleep(BEAT)
    stage.store.slow_from_start = True
    stage.store.restore(key("a"))
    await asyncio.sleep(10)
    assert stage.counters.keys_age == pytest.approx(10, abs=2)
    await stage.store.expire(id_of("a"), 0.0)
    await asyncio.sleep(BEAT)
    assert not stage.knows("a"), "what changes from now on is known all the same"
    stage.store.slow_from_start = False
    await asyncio.sleep(ANSWER_WITHIN + TRY_AGAIN + BEAT)
    assert stage.counters.keys_age == 0.0


async def test_what_a_bite_says_of_a_key_is_older_than_its_change(clock: Callable[[], float]) -> None:
    """The bite that is under way was read before the key was revoked, and comes after that was heard."""

    class Store(StoreInMemory):
        held: asyncio.Event | None = None

        async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
            found = await super().changes(since, limit)
            if self.held is not None and not since.revision:
                await self.held.wait()
            return found

    store = Store(key("a"))
    stage = Scene(clock)
    ring = stage.ring = ApiKeyCache(store, Settings(), StoreCounts(), clock, lambda: EPOCH)
    await ring.open()
    store.restore(key("a"))
    await ring.refresh()
    store.held = asyncio.Event()
    reading = ring._reading
    assert reading is not None
    bite = asyncio.create_task(ring._read_on(reading))
    await asyncio.sleep(0.1)
    await store.expire(id_of("a"), 0.0)
    await ring.refresh()
    store.held.set()
    await bite
    assert not stage.knows("a")


@on_ring(key("a"))
async def test_many_changes_come_in_bites_of_one_beat(stage: Scene) -> None:
    for one in many(2 * PAGE + 1):
        await stage.store.add(one)
    await asyncio.sleep(BEAT)
    assert len(stage.ring) == 2 * PAGE + 2


@on_ring(key("a"), key("b"), key("ended", expires_at=EPOCH))
async def test_ended_keys_are_not_held(stage: Scene) -> None:
    assert len(stage.ring) == 2
    await stage.store.expire(id_of("b"), 0.0)
    await asyncio.sleep(BEAT)
    assert len(stage.ring) == 1
    await stage.store.add(key("c", expires_at=EPOCH + 5.0))
    await asyncio.sleep(BEAT)
    assert len(stage.ring) == 2
    await asyncio.sleep(5.0 + 64 * BEAT)
    assert len(stage.ring) == 1


async def test_a_clock_that_was_wrong_costs_no_key(clock: Callable[[], float]) -> None:
    stage = Scene(clock, key("a", expires_at=EPOCH + 1e6))
    skew = 0.0
    stage.ring = ApiKeyCache(stage.store, Settings(), StoreCounts(), clock, lambda: EPOCH + skew)
    await stage.ring.open()
    skew = 1e7
    for _ in range(64):
        await stage.ring.refresh()
    assert len(stage.ring) == 0
    skew = 0.0
    await stage.ring.refresh()
    assert stage.ring._reading is not None
    await stage.ring._read_on(stage.ring._reading)
    assert stage.knows("a")


def test_long_ended_keys_leave_the_store() -> None:
    async def scene(stage: Scene) -> None:
        await asyncio.sleep(RETIRE_EVERY + 1)
        assert {one.id for one in await stage.store.keys()} == {id_of("a"), id_of("late")}

    day = 86_400.0
    ended = [key("early", expires_at=EPOCH - 31 * day, created_at=0.0), key("late", expires_at=EPOCH - 29 * day)]
    played(scene, key("a"), *ended)


def test_a_store_that_lets_nothing_be_removed_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Scene) -> None:
        monkeypatch.setattr(stage.store, "remove_ended", refuse)
        await asyncio.sleep(3 * RETIRE_EVERY + 1)
        assert stage.knows("a")

    async def refuse(before: float, limit: int) -> int:
        raise StoreUnavailable("permission denied")

    [line] = played(scene, key("a"))
    assert (line["log_level"], line["event"]) == ("info", "ended keys stay in their store")


def test_damage_that_only_the_reading_of_all_meets_lets_nobody_in_until_all_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged = True

    class Store(StoreInMemory):
        async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
            if damaged and not since.revision:
                raise StoreCorrupted("no sense")
            return await super().changes(since, limit)

    async def scene(stage: Scene) -> None:
        nonlocal damaged
        assert stage.knows("a")
        stage.store.__class__ = Store
        await asyncio.sleep(AFRESH_EVERY + BEAT)
        with pytest.raises(RequestError):
            stage._still["a"]()
        with pytest.raises(RequestError):
            stage.ring.identify(bearer("a"))
        await asyncio.sleep(10)
        assert stage.counters.keys_age == pytest.approx(11, abs=2)
        damaged = False
        await asyncio.sleep(TRY_AGAIN + BEAT)
        assert stage.knows("a")

    played(scene, key("a"))


def test_a_round_that_was_overtaken_drops_nothing() -> None:
    table = KeyTable()
    table.begin_reading()
    table.put(key("a"), EPOCH)
    table.begin_reading()
    ending = table.end_reading()
    next(ending)
    table.begin_reading()
    table.put(key("a"), EPOCH)
    assert list(ending) == []
    assert len(table) == 1
