"""Creates the identity, key store and ledger that the settings ask for, and imports only those."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.app.lifecycle import Resource
from headway.config import Settings, shown_url
from headway.config.extras import needing
from headway.errors import SettingError, StoreUnavailable
from headway.identity.principals import AnonymousIdentity
from headway.ports import Identity, KeyMark, KeyStore, Ledger
from headway.runtime.counters import StoreCounts
from headway.runtime.logger import get_logger
from headway.runtime.periodic import BareResource
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

PAGE = 500  # Number of keys to read at once.
AGAIN = 10.0  # Seconds to wait before asking again a store that didn't answer.


def make_identity(settings: Settings, counters: StoreCounts) -> tuple[Identity, Sequence[Resource]]:
    """Return the identity for the configured keys or tokens, or the anonymous one, and the resources that it needs."""
    if not (settings.keys or settings.jwt):
        return AnonymousIdentity(settings.default_tier_index), ()
    if not settings.jwt:
        return _keys(settings, counters)
    if not settings.keys:
        return _tokens(settings)
    from headway.identity.principals import CombinedIdentity

    (keys, key_resources), (tokens, token_resources) = _keys(settings, counters), _tokens(settings)
    return CombinedIdentity(keys, tokens), (*key_resources, *token_resources)


def _keys(settings: Settings, counters: StoreCounts) -> tuple[Identity, Sequence[Resource]]:
    from headway.identity.api_keys.cache import ApiKeyCache

    store = make_key_store(settings, create=settings.keys == "ledger")
    cache = ApiKeyCache(store, settings, counters, time.monotonic, time.time)
    return cache, (cache,)


class UnusedKeys(BareResource):
    """Warns once at startup if the ledger's database contains API keys, but the settings don't use them. An operator who
    created keys most likely wants to require them, but until the settings use them, others may send requests, too. `who`
    describes who is let in without such a key. `wall` returns the Unix time in seconds."""

    def __init__(self, store: Callable[[], KeyStore], who: str, wall: Callable[[], float]) -> None:
        self._store, self._who, self._wall = store, who, wall

    def start(self, supervisor: Supervisor) -> None:
        supervisor.start("unused keys", self._look)

    async def _look(self) -> None:
        while True:
            try:
                count = await self._count()
            except StoreUnavailable:
                await asyncio.sleep(AGAIN)
                continue
            except SettingError:
                return  # The database has no key table, so there are no keys.
            if count:
                hint = "Set --keys ledger to require them, or revoke them."
                log.warning("API keys in the ledger are not used", keys=count, let_in=self._who, hint=hint)
            return

    async def _count(self) -> int:
        store, count, mark = self._store(), 0, KeyMark()
        try:
            await store.open()
            while (changes := await store.changes(mark, PAGE)) is not None:
                now = self._wall()
                count += sum(key.expires_at is None or key.expires_at > now for key in changes.keys)
                if not changes.more:
                    break
                mark = changes.upto
            return count
        finally:
            await store.close()


def look_for_unused_keys(settings: Settings) -> Sequence[Resource]:
    """Return the resource that warns of unused keys. Return none unless the settings name a ledger but don't use its keys."""
    if not settings.ledger or settings.keys == "ledger":
        return ()
    others = " and ".join(filter(None, (settings.keys, settings.jwt)))
    who = f"who has a credential of {others}" if others else "everybody"
    with_keys = dataclasses.replace(settings, keys="ledger")
    return (UnusedKeys(lambda: make_key_store(with_keys), who, time.time),)


def make_key_store(settings: Settings, *, create: bool = False) -> KeyStore:
    """Build the store of API keys without opening it. It is a file or the ledger's database. If `create`, a missing file will
    be created. Raises SettingError if the settings name no store, a package is missing, or the SQLite file is missing and
    `create` is False."""
    if settings.keys not in ("", "ledger"):
        from headway.identity.api_keys.file import KeysFile

        return KeysFile(Path(settings.keys), create=create)
    if not settings.ledger:
        hint = "Name a file with --keys FILE, or a database with --ledger URL."
        raise SettingError("keys", settings.keys, "must be given, or a ledger", hint)
    if settings.ledger.startswith("sqlite:"):
        from headway.storage.sqlite import SqliteKeys, existing

        return SqliteKeys(settings.ledger if create else existing(settings.ledger))
    with postgres_needed(settings.ledger):
        from headway.storage.postgres import PostgresKeys
    return PostgresKeys(settings.ledger)


def _tokens(settings: Settings) -> tuple[Identity, Sequence[Resource]]:
    with needing("jwt", "jwt", settings.jwt, "needs the package PyJWT[crypto], which is not installed"):
        from headway.identity.jwt.issuers import read_issuers
        from headway.identity.jwt.keysets import FileSource, KeySet, UrlSource
        from headway.identity.jwt.tokens import Tokens

    def read() -> list[KeySet]:
        return [
            KeySet(issuer, UrlSource(issuer.jwks) if issuer.remote else FileSource(Path(issuer.jwks)), time.monotonic)
            for issuer in read_issuers(Path(settings.jwt), settings.tier_names)
        ]

    tokens = Tokens(read(), settings, time.time, again=read)
    return tokens, (tokens,)


def make_ledger(url: str) -> Ledger:
    """Build the ledger for the database at a URL, without opening it."""
    if url.startswith("sqlite:"):
        from headway.storage.sqlite import SqliteLedger

        return SqliteLedger(url)
    with postgres_needed(url):
        from headway.storage.postgres import PostgresLedger
    return PostgresLedger(url)


def postgres_needed(url: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for imports of asyncpg. It raises SettingError if asyncpg isn't installed."""
    return needing("postgres", "ledger", shown_url(url), "needs the package asyncpg, which is not installed")
