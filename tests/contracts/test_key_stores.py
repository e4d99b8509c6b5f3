"""What every store of API keys promises, whether it is a file or a database.

A new store is a line in STORES: what makes, from a folder and a server of PostgreSQL, a function that makes one more store
of the same place each time it is called. Databases come from `tests.contracts.ledgers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.identity.keys_file import KeysFile
from headway.model import Key
from headway.ports import KeyStore
from tests.contracts.ledgers import DATABASES, Database
from tests.identity.store import StoreInMemory
from tests.identity.writing import digest_of, id_of
from tests.servers.postgres import SharedPostgres

Maker = Callable[[], KeyStore]
AT = 1_790_000_000.25


def _in_memory(folder: Path, postgres: SharedPostgres) -> Maker:
    store = StoreInMemory()
    return lambda: store


def _in_file(folder: Path, postgres: SharedPostgres) -> Maker:
    return lambda: KeysFile(folder / "keys.toml", create=True)


def _in(database: Callable[[Path, SharedPostgres], Database]) -> Callable[[Path, SharedPostgres], Maker]:
    def maker(folder: Path, postgres: SharedPostgres) -> Maker:
        made = database(folder, postgres)
        return lambda: made.keys(made.url)

    return maker


STORES: dict[str, Callable[[Path, SharedPostgres], Maker]] = {
    "memory": _in_memory,
    "file": _in_file,
    **{name: _in(database) for name, database in DATABASES.items()},
}


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path, postgres: SharedPostgres) -> Maker:
    return STORES[request.param](tmp_path, postgres)


def key(name: str, created_at: float = AT, **changed: Any) -> Key:
    plain = Key(id=id_of(name), digest=digest_of(name), user="ada", tenant="acme", tier="paid", created_at=created_at)
    return msgspec.structs.replace(plain, **changed)


def opened(place: Maker, story: Callable[..., Awaitable[None]], count: int = 1) -> None:
    """Run a story on so many open stores of one place."""

    async def main() -> None:
        stores = [place() for _ in range(count)]
        try:
            for store in stores:
                await store.open()
            await story(*stores)
        finally:
            for store in stores:
                await store.close()

    asyncio.run(main())


def ids(keys: Any) -> list[str]:
    return [key.id for key in keys]


def test_a_key_comes_back_as_it_was(place: Maker) -> None:
    plain = key("plain")
    full = key(
        "full",
        user="ürsula ☃ \"'\\",
        tenant="\N{DUCK}" * 128,
        models=("a", "ß/b"),
        rate=0.0,
        burst=2.5,
        created_at=AT + 1,
        expires_at=AT + 86_400.125,
        replaces=plain.id,
    )

    async def story(store: KeyStore) -> None:
        for one in (plain, full):
            await store.add(one)
        assert [await store.get(one.id) for one in (plain, full)] == [plain, full]
        assert list(await store.keys()) == [plain, full]

    async def again(store: KeyStore) -> None:
        assert list(await store.keys()) == [plain, full]

    opened(place, story)
    opened(place, again)


def test_an_empty_store(place: Maker) -> None:
    async def story(store: KeyStore) -> None:
        assert list(await store.keys()) == []
        assert await store.get(id_of("a")) is None
        assert not await store.expire(id_of("a"), AT)
        revision, changed = await store.changes(0)
        assert list(changed) == []
        await store.add(key("a"))
        assert ids((await store.changes(revision))[1]) == [id_of("a")]

    opened(place, story)


def test_an_id_is_taken_once(place: Maker) -> None:
    async def story(store: KeyStore) -> None:
        await store.add(key("a"))
        with pytest.raises(ValueError, match=id_of("a")):
            await store.add(key("a", user="eve"))
        assert list(await store.keys()) == [key("a")]
        await store.add(key("b"))

    opened(place, story)


def test_of_two_rotations_at_once_one_wins(place: Maker) -> None:
    async def story(first: KeyStore, second: KeyStore) -> None:
        await first.add(key("a"))
        await first.add(key("other"))
        rivals = [store.add(key(name, AT + 1, replaces=id_of("a"))) for store, name in ((first, "b"), (second, "c"))]
        lost = [error for error in await asyncio.gather(*rivals, return_exceptions=True) if error is not None]
        [winner] = [one for one in await first.keys() if one.replaces]
        assert [str(error) for error in lost] == [f"{id_of('a')} has just been replaced by {winner.id}, which lives"]
        assert isinstance(lost[0], ValueError)
        await first.add(key("d", AT + 1, replaces=id_of("other")))
        await first.expire(winner.id, AT + 2)
        with pytest.raises(ValueError, match=winner.id):
            await second.add(key("e", AT + 1.5, replaces=id_of("a")))
        await second.add(key("e", AT + 2, replaces=id_of("a")))

    opened(place, story, count=2)


def test_keys_are_told_oldest_first(place: Maker) -> None:
    async def story(store: KeyStore) -> None:
        for name, created_at in (("c", AT + 2), ("a", AT + 1), ("b", AT)):
            await store.add(key(name, created_at))
        assert ids(await store.keys()) == [id_of("b"), id_of("a"), id_of("c")]

    opened(place, story)


def test_an_end_may_only_come_nearer(place: Maker) -> None:
    async def story(store: KeyStore) -> None:
        await store.add(key("a"))
        for at, end in ((AT + 9, AT + 9), (AT + 5, AT + 5), (AT + 7, AT + 5), (0.0, 0.0)):
            assert await store.expire(id_of("a"), at)
            assert await store.get(id_of("a")) == key("a", expires_at=end)
        assert list(await store.keys()) == [key("a", expires_at=0.0)], "an ended key is kept"

    opened(place, story)


def test_changes_are_told_once_to_each(place: Maker) -> None:
    async def story(writer: KeyStore, first: KeyStore, second: KeyStore) -> None:
        await writer.add(key("a"))
        await writer.add(key("b"))
        early, changed = await first.changes(0)
        assert sorted(ids(changed)) == sorted((id_of("a"), id_of("b")))
        revision, changed = await first.changes(early)
        assert (revision, list(changed)) == (early, [])
        await writer.expire(id_of("a"), AT + 5)
        await writer.add(key("c"))
        late, changed = await first.changes(early)
        assert late > early
        assert sorted(changed, key=lambda key: key.user + key.id) == sorted(
            [key("a", expires_at=AT + 5), key("c")], key=lambda key: key.user + key.id
        )
        assert list((await first.changes(late))[1]) == []
        _, everything = await second.changes(0)
        assert len(everything) == 3

    opened(place, story, count=3)


def test_nothing_is_missed_between_two_questions(place: Maker) -> None:
    names = [f"key{letter}" for letter in "abcdefghijklmnop"]

    async def story(reader: KeyStore, *writers: KeyStore) -> None:
        seen: set[str] = set()
        revision = 0

        async def read() -> None:
            nonlocal revision
            while len(seen) < len(names):
                revision, changed = await reader.changes(revision)
                seen.update(ids(changed))
                await asyncio.sleep(0)

        async def write(number: int) -> None:
            for name in names[number::4]:
                await writers[number].add(key(name))

        async with asyncio.timeout(120):
            await asyncio.gather(read(), *map(write, range(4)))
        assert seen == set(map(id_of, names))

    opened(place, story, count=5)
