"""Promises of every store of API keys, both files and databases. To add a store, add it to STORES: a function of a
folder and a PostgreSQL server. It returns a function that makes one more store of the same place at each call.
Databases come from `tests.contracts.ledgers`."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.identity.api_keys.file import KeysFile
from headway.model import ApiKey, ModelLimit
from headway.ports import KeyMark, KeyStore
from headway.storage import rows
from tests.contracts.ledgers import DATABASES, Database, opened
from tests.identity.store import StoreInMemory
from tests.identity.writing import digest_of, id_of
from tests.scenes import Played
from tests.servers.postgres import SharedPostgres

Maker = Callable[[], KeyStore]
AT = 1_790_000_000.25


def _in_memory(folder: Path, postgres: SharedPostgres) -> Maker:
    store = StoreInMemory()
    return lambda: store


def _in_file(folder: Path, postgres: SharedPostgres) -> Maker:
    return lambda: KeysFile(folder / "keys.toml", create=True)


def _in(database: Callable[[Path, SharedPostgres], Database]) -> Callable[[Path, SharedPostgres], Maker]:
    return lambda folder, postgres: database(folder, postgres).keys


STORES: dict[str, Callable[[Path, SharedPostgres], Maker]] = {
    "memory": _in_memory,
    "file": _in_file,
    **{name: _in(database) for name, database in DATABASES.items()},
}


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path, postgres: SharedPostgres) -> Maker:
    return STORES[request.param](tmp_path, postgres)


def key(name: str, created_at: float = AT, **changed: Any) -> ApiKey:
    plain = ApiKey(
        id=id_of(name), digest=digest_of(name), user="ada", tenant="acme", tier="paid", created_at=created_at
    )
    return msgspec.structs.replace(plain, **changed)


@pytest.fixture
def store(place: Maker) -> Played:
    return Played(partial(opened, place))


async def told(store: KeyStore, since: KeyMark) -> tuple[list[ApiKey], KeyMark]:
    found = await store.changes(since, 1000)
    assert found is not None
    assert not found.more
    return list(found.keys), found.upto


def ids(keys: Any) -> list[str]:
    return [key.id for key in keys]


def test_a_key_comes_back_as_it_was(place: Maker) -> None:
    plain = key("plain")
    full = key(
        "full",
        user="ürsula ☃ \"'\\",
        tenant="\N{DUCK}" * 128,
        models=("a", "ß/b"),
        rate=1 / 3,
        burst=2.5,
        created_at=AT + 1.123457,
        expires_at=AT + 86_400.125,
        replaces=plain.id,
        model_limits=(ModelLimit("a", 1 / 3), ModelLimit("ß/b", 60.0, 2.0)),
    )

    async def story(store: KeyStore) -> None:
        for one in (plain, full):
            await store.add(one)
        assert [await store.get(one.id) for one in (plain, full)] == [plain, full]
        assert list(await store.keys()) == [plain, full]
        assert (await told(store, KeyMark()))[0] == [plain, full]

    async def again(store: KeyStore) -> None:
        assert list(await store.keys()) == [plain, full]

    opened(place, story)
    opened(place, again)


async def test_an_empty_store_has_no_keys_and_notices_its_first(store: KeyStore) -> None:
    assert list(await store.keys()) == []
    assert await store.get(id_of("a")) is None
    assert not await store.expire(id_of("a"), AT)
    assert await told(store, KeyMark()) == ([], KeyMark())
    assert await store.latest() == KeyMark()
    await store.add(key("a"))
    assert ids((await told(store, KeyMark()))[0]) == [id_of("a")]


def test_of_two_rotations_at_once_one_wins(place: Maker) -> None:
    async def story(first: KeyStore, second: KeyStore) -> None:
        await first.add(key("a"))
        await first.add(key("other"))
        rivals = [store.add(key(name, AT + 1, replaces=id_of("a"))) for store, name in ((first, "b"), (second, "c"))]
        lost = [error for error in await asyncio.gather(*rivals, return_exceptions=True) if error is not None]
        [winner] = [one for one in await first.keys() if one.replaces]
        assert [str(error) for error in lost] == [
            f"{id_of('a')} has just been replaced by {winner.id}, which is still valid"
        ]
        assert isinstance(lost[0], ValueError)
        await first.add(key("d", AT + 1, replaces=id_of("other")))
        await first.expire(winner.id, AT + 2)
        with pytest.raises(ValueError, match=winner.id):
            await second.add(key("e", AT + 1.5, replaces=id_of("a")))
        await second.add(key("e", AT + 2, replaces=id_of("a")))

    opened(place, story, count=2)


async def test_an_id_is_taken_once_and_its_end_may_only_come_nearer(store: KeyStore) -> None:
    await store.add(key("a"))
    with pytest.raises(ValueError, match=id_of("a")):
        await store.add(key("a", user="eve"))
    assert list(await store.keys()) == [key("a")]
    for at, end in ((AT + 9, AT + 9), (AT + 5, AT + 5), (AT + 7, AT + 5), (0.0, 0.0)):
        assert await store.expire(id_of("a"), at)
        assert await store.get(id_of("a")) == key("a", expires_at=end)
    assert list(await store.keys()) == [key("a", expires_at=0.0)], "an ended key is kept"
    before = await store.latest()
    assert not await store.expire(id_of("b"), AT)
    assert await told(store, before) == ([], before), "an unknown key that is to end is no change"
    await store.add(key("b"))
    assert ids((await told(store, before))[0]) == [id_of("b")]


async def test_keys_are_told_oldest_first_and_changes_in_bites(store: KeyStore) -> None:
    names = ["c", "a", "b", "d", "e"]
    for name, created_at in zip(names, (AT + 2, AT + 1, AT, AT + 3, AT + 4), strict=True):
        await store.add(key(name, created_at))
    assert ids(await store.keys()) == [id_of(name) for name in "bacde"]
    upto, seen, sizes, more = KeyMark(), [], [], True
    while more:
        found = await store.changes(upto, 2)
        assert found is not None
        seen += ids(found.keys)
        sizes.append(len(found.keys))
        upto, more = found.upto, found.more
    assert (sorted(seen), sizes) == (sorted(map(id_of, names)), [2, 2, 1])
    assert upto == await store.latest()


def test_changes_are_told_once_to_each(place: Maker) -> None:
    async def story(writer: KeyStore, first: KeyStore, second: KeyStore) -> None:
        await writer.add(key("a"))
        await writer.add(key("b"))
        changed, early = await told(first, KeyMark())
        assert sorted(ids(changed)) == sorted((id_of("a"), id_of("b")))
        assert await told(first, early) == ([], early)
        assert await first.latest() == early
        await writer.expire(id_of("a"), AT + 5)
        await writer.add(key("c"))
        changed, late = await told(first, early)
        assert late.revision > early.revision
        assert sorted(changed, key=lambda key: key.user + key.id) == sorted(
            [key("a", expires_at=AT + 5), key("c")], key=lambda key: key.user + key.id
        )
        assert await told(first, late) == ([], late)
        assert len((await told(second, KeyMark()))[0]) == 3

    opened(place, story, count=3)


async def test_long_ended_keys_are_removed_and_only_they(store: KeyStore) -> None:
    """A file keeps its ended keys, because its owner wrote it."""
    now = time.time()
    for name, changed in (
        ("live", {}),
        ("ended", {"expires_at": AT + 1}),
        ("later", {"expires_at": now + 86_400}),
        ("revoked", {}),
    ):
        await store.add(key(name, **changed))
    await store.expire(id_of("revoked"), 0.0)
    assert await store.remove_ended(AT, 10) == 0
    before = await store.latest()
    removed = 0 if isinstance(store, KeysFile) else 2
    assert sum([await store.remove_ended(now + 60, 1) for _ in range(3)]) == removed
    assert await told(store, before) == ([], before), "nobody needs to hear of it"
    left = {id_of(name) for name in ("live", "later", "ended", "revoked")[: 4 - removed]}
    assert set(ids(await store.keys())) == left
    await store.add(key("next"))
    assert ids((await told(store, before))[0]) == [id_of("next")]


def test_nothing_is_missed_between_two_questions(place: Maker) -> None:
    names = [f"key{letter}" for letter in "abcdefghijklmnop"]

    async def story(reader: KeyStore, *writers: KeyStore) -> None:
        seen: set[str] = set()
        upto = KeyMark()

        async def read() -> None:
            nonlocal upto
            while len(seen) < len(names):
                changed, upto = await told(reader, upto)
                seen.update(ids(changed))
                await asyncio.sleep(0)

        async def write(number: int) -> None:
            for name in names[number::4]:
                await writers[number].add(key(name))

        async with asyncio.timeout(120):
            await asyncio.gather(read(), *map(write, range(4)))
        assert seen == set(map(id_of, names))

    opened(place, story, count=5)


@pytest.fixture
def stored(database: Database) -> Played:
    return Played(partial(opened, database.keys))


async def test_a_revision_that_is_used_again_is_another_change(stored: KeyStore, database: Database) -> None:
    """A failover loses the last change, which a reader has already seen."""
    await stored.add(key("a"))
    early = await stored.latest()
    await stored.add(key("b"))
    late = await stored.latest()
    for table in ("headway_keys", "headway_key_changes"):
        await asyncio.to_thread(database.query, f"DELETE FROM {table} WHERE revision = {late.revision}")
    assert await stored.changes(late, 10) is None
    assert await told(stored, early) == ([], early)
    await stored.expire(id_of("a"), 0.0)
    assert (await stored.latest()).revision == late.revision
    assert await stored.changes(late, 10) is None
    assert ids((await told(stored, early))[0]) == [id_of("a")]


async def test_a_reader_that_is_far_behind_reads_all(stored: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MARKS", 2)
    await stored.add(key("a"))
    marks = [await stored.latest()]
    for name in "bcd":
        await stored.add(key(name))
        marks.append(await stored.latest())
    assert [await stored.changes(mark, 10) is None for mark in marks] == [True, True, False, False]


def test_keys_from_before_there_were_marks_are_told_and_kept(database: Database) -> None:
    """A process of the previous version adds and revokes keys while this one reads."""

    async def story(store: KeyStore) -> None:
        await store.add(key("a"))
        upto = await store.latest()
        await asyncio.to_thread(
            database.query,
            "INSERT INTO headway_keys (id, revision, digest, user_id, tenant, tier, models, created_at, replaces) "
            "SELECT 'b00000000000', revision + 1, digest, user_id, tenant, tier, models, created_at, replaces "
            "FROM headway_keys",
        )
        changed, upto = await told(store, upto)
        assert (ids(changed), upto.mark) == (["b00000000000"], "")
        assert await told(store, upto) == ([], upto)
        await store.add(key("c"))
        changed, upto = await told(store, upto)
        assert ids(changed) == [id_of("c")]
        assert upto.mark

    opened(database.keys, story)
