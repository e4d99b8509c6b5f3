"""Choice of identity, key store and ledger by the settings; each is imported only where it is chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from headway.app.lifecycle import Resource
from headway.config import Settings, shown_url
from headway.config.extras import needing
from headway.errors import SettingError
from headway.identity.principals import AnonymousIdentity
from headway.ports import Identity, KeyStore, Ledger
from headway.runtime.counters import StoreCounts


def make_identity(settings: Settings, counters: StoreCounts) -> tuple[Identity, Sequence[Resource]]:
    """Make the identity for the configured keys or tokens, or the anonymous one, and the resources that it needs."""
    if not (settings.keys or settings.jwt):
        return AnonymousIdentity(settings.default_tier_index), ()
    if not settings.jwt:
        return _keys(settings, counters)
    if not settings.keys:
        return _tokens(settings)
    from headway.identity.combined import CombinedIdentity

    (keys, beside), (tokens, sets) = _keys(settings, counters), _tokens(settings)
    return CombinedIdentity(keys, tokens), (*beside, *sets)


def _keys(settings: Settings, counters: StoreCounts) -> tuple[Identity, Sequence[Resource]]:
    from headway.identity.api_keys.cache import ApiKeyCache

    store = make_key_store(settings, create=settings.keys == "ledger")
    cache = ApiKeyCache(store, settings, counters, time.monotonic, time.time)
    return cache, (cache,)


def look_for_unused_keys(settings: Settings) -> Sequence[Resource]:
    """Make the resource that warns of keys in the ledger that no setting asks for, if it is needed."""
    if not settings.ledger or settings.keys == "ledger":
        return ()
    from headway.app.unused_keys import UnusedKeys

    others = " and ".join(filter(None, (settings.keys, settings.jwt)))
    who = f"who has a credential of {others}" if others else "everybody"
    asked = dataclasses.replace(settings, keys="ledger")
    return (UnusedKeys(lambda: make_key_store(asked), who, time.time),)


def make_key_store(settings: Settings, *, create: bool = False) -> KeyStore:
    """Make the store of API keys, not yet open.

    Arguments:
        settings: settings that name a file of keys, or the ledger's database, which is used when `keys` names nothing.
        create: whether a file may be missing until the first key is added, or is made as that of the ledger.

    Raises:
        SettingError: neither is named, there is no such file of SQLite, or a package is missing.
    """
    if settings.keys not in ("", "ledger"):
        from headway.identity.api_keys.file import KeysFile

        return KeysFile(Path(settings.keys), create=create)
    if not settings.ledger:
        hint = "Name a file with --keys FILE, or a database with --ledger URL."
        raise SettingError("keys", settings.keys, "does not say where API keys are", hint)
    if settings.ledger.startswith("sqlite:"):
        from headway.storage.sqlite.database import existing
        from headway.storage.sqlite.keys import SqliteKeys

        return SqliteKeys(settings.ledger if create else existing(settings.ledger))
    return _postgres_keys(settings.ledger)


def _tokens(settings: Settings) -> tuple[Identity, Sequence[Resource]]:
    """Make the identity of tokens."""
    with needing("jwt", "jwt", settings.jwt, "needs the package PyJWT[crypto], which is not here"):
        from headway.identity.jwt.issuers import read_issuers
        from headway.identity.jwt.keysets import KeySet
        from headway.identity.jwt.sources import FileSource, UrlSource
        from headway.identity.jwt.tokens import Tokens

    def read() -> list[KeySet]:
        return [
            KeySet(issuer, UrlSource(issuer.jwks) if issuer.remote else FileSource(Path(issuer.jwks)), time.monotonic)
            for issuer in read_issuers(Path(settings.jwt), settings.tier_names)
        ]

    tokens = Tokens(read(), settings, time.time, again=read)
    return tokens, (tokens,)


def make_ledger(url: str) -> Ledger:
    """Make the ledger in the database of a URL, not yet open."""
    if url.startswith("sqlite:"):
        from headway.storage.sqlite.ledger import SqliteLedger

        return SqliteLedger(url)
    with postgres_needed(url):
        from headway.storage.postgres.ledger import PostgresLedger
    return PostgresLedger(url)


def _postgres_keys(url: str) -> KeyStore:
    with postgres_needed(url):
        from headway.storage.postgres.keys import PostgresKeys
    return PostgresKeys(url)


def postgres_needed(url: str) -> contextlib.AbstractContextManager[None]:
    """Block that imports what needs asyncpg. `url`: URL of the database. Raises SettingError."""
    return needing("postgres", "ledger", shown_url(url), "needs the package asyncpg, which is not here")
