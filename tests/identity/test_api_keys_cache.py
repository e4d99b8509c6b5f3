"""The in-memory cache of API keys: what it knows when, and how it reads the store, on virtual time."""

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
import structlog.testing

from headway.config import Settings
from headway.errors import RequestError, StoreCorrupted, StoreUnavailable
from headway.identity.api_keys import cache
from headway.identity.api_keys.cache import (
    ANSWER_WITHIN,
    PAGE,
    REREAD_EVERY,
    RETIRE_EVERY,
    TRY_AGAIN,
    ApiKeyCache,
    KeyTable,
)
from headway.identity.principals import AnonymousIdentity, CombinedIdentity
from headway.model import ApiKey, Limit, Principal
from headway.ports import KeyChanges, KeyMark
from headway.runtime.counters import StoreCounts
from headway.runtime.supervisor import Supervisor
from tests import scenes
from tests.identity.store import StoreInMemory
from tests.identity.writing import digest_of, id_of, key_of
from tests.virtual_time import run

EPOCH = 1_700_000_000.0


def key(name: str, **changed: Any) -> ApiKey:
    usual: dict[str, Any] = {"user": name, "tenant": "acme", "tier": "paid", "created_at": EPOCH}
    return ApiKey(id=id_of(name), digest=digest_of(name), **{**usual, **changed})


def bearer(name: str) -> bytes:
    return f"Bearer {key_of(name)}".encode()


class Scene:
    """A key ring that rereads an in-memory store on each beat. Its wall clock starts at EPOCH."""

    def __init__(self, clock: Callable[[], float], *keys: ApiKey) -> None:
        self.clock = clock
        self.store = StoreInMemory(*keys)
        self.counters = StoreCounts()
        began = clock()
        self.ring = ApiKeyCache(self.store, Settings(), self.counters, clock, lambda: EPOCH + clock() - began)
        self.logged: list[Any] = []
        self._still: dict[str, Callable[[], Principal | None]] = {}

    def knows(self, name: str) -> bool:
        """Return whether a key is known. A connection that used it before must get the same answer."""
        still = self._still.get(name)
        told = [still() for still in (still,) if still is not None]
        known = self.ring.identify(bearer(name))
        assert all(one == known for one in told)
        if still is None and (watched := self.ring.watch(bearer(name))) is not None:
            self._still[name] = watched
        return known is not None


def on_ring(*keys: ApiKey) -> Callable[[scenes.Scene], Callable[..., None]]:
    """Turn a coroutine function into a test of a ring, over a store with these keys."""

    def play(scene: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        async def main(clock: Callable[[], float]) -> None:
            stage = Scene(clock, *keys)
            stage.logged = logged
            await stage.ring.open()
            supervisor = Supervisor()
            stage.ring.start(supervisor)
            try:
                await scene(stage)
            finally:
                await supervisor.stop()
                await stage.ring.close()
            assert (stage.store.opened, stage.store.closed) == (1, 1)

        with structlog.testing.capture_logs() as logged:
            run(main)

    return scenes.scene(play)


def test_without_keys_everybody_is_the_same_anonymous_user() -> None:
    for authorization in (b"", b"Bearer whatever"):
        expected = Principal(user="anonymous", tenant="default", tier=2)
        assert AnonymousIdentity(2).identify(authorization) == expected


@on_ring(key("a", rate=60.0, burst=5.0, models=("m",)), key("b"))
async def test_a_key_brings_its_rights_however_its_scheme_is_written(stage: Scene) -> None:
    principal = stage.ring.identify(bearer("a"))
    assert principal is not None
    for form in ("bearer {}", "BEARER   {} "):
        assert stage.ring.identify(form.format(key_of("a")).encode()) == principal
    for identity in (stage.ring, CombinedIdentity(stage.ring, stage.ring)):
        assert (identity.principal_of(id_of("a")), identity.principal_of("unknown")) == (principal, None)
    for shown in (vars(stage.ring), stage.ring, principal):
        assert "canary" not in repr(shown) and digest_of("a").hex() not in repr(stage.ring)
    assert (principal.user, principal.tenant, principal.tier, principal.key) == ("a", "acme", 1, id_of("a"))
    assert principal.models == {"m"}
    assert principal.limits == (Limit(f"key\0{id_of('a')}", "key", 60.0, 5.0),)
    other = stage.ring.identify(bearer("b"))
    assert other is not None
    assert other.limits == (Limit("user\0acme\0b", "user", 1000.0, 10_000 / 60),)
    assert len(stage.ring) == 2


@on_ring(key("a"), msgspec.structs.replace(key("c"), digest=digest_of("b")))
async def test_a_credential_that_is_no_known_key_identifies_nobody(stage: Scene) -> None:
    assert not stage.knows("c"), "the right id with the wrong secret"
    text = key_of("a")
    other = key_of("b")
    for wrong in (
        b"",
        text.encode(),
        f"Basic {text}".encode(),
        f"Bearer{text}".encode(),
        f"Bearer {text}x".encode(),
        f"Bearer {text.swapcase()}".encode(),
        f"Bearer {other}".encode(),
        f"Bearer {text}, Bearer {text}".encode(),
    ):
        assert stage.ring.identify(wrong) is None, wrong


@on_ring(key("a"))
async def test_an_unknown_id_costs_the_same_comparison(stage: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return hmac.compare_digest(first, second)

    monkeypatch.setattr(cache, "compare_digest", compare)

    assert stage.knows("a")
    assert not stage.knows("b")
    assert [tuple(map(len, pair)) for pair in compared] == [(32, 32), (32, 32)]


@on_ring(key("a"))
async def test_a_connection_is_told_of_what_becomes_of_its_key(stage: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage.ring.watch(bearer("a")) is None, "it has not come yet"
    assert stage.knows("a")
    monkeypatch.setattr(cache, "blake2b", None)
    still = stage._still["a"]
    assert still() is not None, "its digest is made once"
    monkeypatch.undo()
    await stage.store.add(key("b"))
    assert not stage.knows("b")
    await asyncio.sleep(1.01)
    assert stage.knows("a") and stage.knows("b")
    stage.ring._seen.clear()
    assert stage.knows("a")
    await stage.store.expire(id_of("a"), EPOCH)
    await asyncio.sleep(1.01)
    assert not stage.knows("a") and still() is None


async def test_a_key_ends_at_its_instant(clock: Callable[[], float]) -> None:
    store, now = StoreInMemory(key("a", expires_at=EPOCH + 10.0)), EPOCH
    ring = ApiKeyCache(store, Settings(), StoreCounts(), clock, lambda: now)
    await ring.open()
    for at, known in ((EPOCH + 9.999999, True), (EPOCH + 10.0, False), (EPOCH + 1e9, False)):
        now = at
        assert (ring.identify(bearer("a")) is not None) == known


@on_ring(key("a"), key("b"))
async def test_while_the_store_is_away_the_last_known_keys_go_on(stage: Scene) -> None:
    await stage.store.expire(id_of("b"), EPOCH + 30.0)
    await asyncio.sleep(1.5)
    assert stage.counters.keys_age == 0.0
    stage.store.away = True
    await asyncio.sleep(20)
    assert stage.knows("a") and stage.knows("b")
    assert stage.counters.keys_age == pytest.approx(20, abs=1.01)
    await asyncio.sleep(20)
    assert stage.knows("a")
    assert not stage.knows("b"), "what is known of its end holds on"
    stage.store.away = False
    await asyncio.sleep(1.5)
    assert stage.counters.keys_age == 0.0
    away, back = (line["event"] for line in stage.logged)
    assert (away, back) == ("the store of keys is out of reach", "the store of keys is back")


@on_ring(key("a"))
async def test_a_store_that_is_stuck_is_given_up_with_each_beat(stage: Scene) -> None:
    stage.store.write_blocked = True
    await asyncio.sleep(10)
    assert stage.knows("a")
    stage.store.write_blocked = False
    await stage.store.expire(id_of("a"), EPOCH)
    await asyncio.sleep(ANSWER_WITHIN + 1.5)
    assert not stage.knows("a")
    assert "did not respond within 2 s" in stage.logged[0]["error"]


@on_ring(key("a"), key("b", tier="gold"))
async def test_a_key_of_a_tier_that_is_gone_is_refused_and_the_others_are_not(stage: Scene) -> None:
    assert stage.knows("a")
    assert not stage.knows("b")
    await asyncio.sleep(2 * REREAD_EVERY)
    assert not stage.knows("b")
    [line] = stage.logged
    assert (line["log_level"], line["key"], line["tier"]) == ("error", id_of("b"), "gold")
    assert "canary" not in str(line)


async def test_a_store_that_cannot_be_reached_is_no_beginning(clock: Callable[[], float]) -> None:
    stage = Scene(clock, key("a"))
    stage.store.away = True
    with pytest.raises(StoreUnavailable):
        await stage.ring.open()
    stage.store.away = False
    await stage.ring.open()
    assert stage.knows("a")


BEAT = 1.01


@on_ring(key("a"), key("b"))
async def test_a_revocation_is_seen_while_all_keys_cannot_be_read(stage: Scene) -> None:
    stage.store.slow_from_start = True
    await asyncio.sleep(2 * REREAD_EVERY)
    await stage.store.expire(id_of("a"), 0.0)
    await asyncio.sleep(BEAT)
    assert not stage.knows("a")
    assert stage.counters.keys_age == 0.0
    stage.store.slow_from_start = False
    stage.store.forget(id_of("b"))
    await asyncio.sleep(ANSWER_WITHIN + TRY_AGAIN + BEAT)
    assert not stage.knows("b")
    [line] = stage.logged
    assert (line["log_level"], line["event"]) == ("warning", "cannot reread all keys; still following their changes")


@on_ring(key("a"), key("b"))
async def test_a_revision_that_is_used_again_after_a_failover_is_noticed_with_the_next_beat(stage: Scene) -> None:
    before = [key("a"), key("b")]
    await stage.store.add(key("lost"))
    await asyncio.sleep(BEAT)
    assert stage.knows("lost")
    stage.store.restore(*before)
    await stage.store.expire(id_of("a"), 0.0)  # This reuses the lost key's revision.
    await asyncio.sleep(BEAT)
    assert not stage.knows("a")
    assert not stage.knows("lost")
    assert stage.knows("b")
    [line] = stage.logged
    assert (line["log_level"], line["event"]) == (
        "warning",
        "the key store's history has changed; reading all keys again",
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
    """A bite that was read before the revocation arrives after it."""

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


@on_ring(key("a"), key("b"), key("ended", expires_at=EPOCH))
async def test_ended_keys_are_not_held_and_many_changes_come_in_one_beat(stage: Scene) -> None:
    assert len(stage.ring) == 2
    await stage.store.expire(id_of("b"), 0.0)
    await asyncio.sleep(BEAT)
    assert len(stage.ring) == 1
    await stage.store.add(key("c", expires_at=EPOCH + 5.0))
    await asyncio.sleep(BEAT)
    assert len(stage.ring) == 2
    await asyncio.sleep(5.0 + 64 * BEAT)
    assert len(stage.ring) == 1
    for number in range(2 * PAGE + 1):
        await stage.store.add(msgspec.structs.replace(key("n"), id=f"{number:012}"))
    await asyncio.sleep(BEAT)
    assert len(stage.ring) == 2 * PAGE + 2


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


DAY = 86_400.0
ENDED = key("early", expires_at=EPOCH - 31 * DAY, created_at=0.0), key("late", expires_at=EPOCH - 28 * DAY)


@on_ring(key("a"), *ENDED)
async def test_long_ended_keys_leave_the_store_and_one_that_lets_none_be_removed_is_told_of_once(
    stage: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(before: float, limit: int) -> int:
        raise StoreUnavailable("permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(stage.store, "remove_ended", refuse)
        await asyncio.sleep(3 * RETIRE_EVERY + 1)
        assert stage.knows("a") and len(await stage.store.keys()) == 3
    await asyncio.sleep(RETIRE_EVERY + 1)
    assert {one.id for one in await stage.store.keys()} == {id_of("a"), id_of("late")}
    assert (stage.logged[0]["log_level"], stage.logged[0]["event"]) == (
        "info",
        "expired keys cannot be removed from their store",
    )
    assert len(stage.logged) <= 2


@on_ring(key("a"))
async def test_damage_in_the_first_reading_lets_nobody_in_until_it_is_whole(stage: Scene) -> None:
    damaged = True

    class Store(StoreInMemory):
        async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
            if damaged and not since.revision:
                raise StoreCorrupted("no sense")
            return await super().changes(since, limit)

    assert stage.knows("a")
    stage.store.__class__ = Store
    await asyncio.sleep(REREAD_EVERY + BEAT)
    with pytest.raises(RequestError):
        stage._still["a"]()
    with pytest.raises(RequestError):
        stage.ring.identify(bearer("a"))
    await asyncio.sleep(10)
    assert stage.counters.keys_age == pytest.approx(11, abs=2)
    damaged = False
    await asyncio.sleep(TRY_AGAIN + BEAT)
    assert stage.knows("a")


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
