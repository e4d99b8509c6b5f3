"""Who asks, and how much they may ask."""

from __future__ import annotations

import msgspec


class Limit(msgspec.Struct, frozen=True, gc=False):
    """A rate limit that a request counts towards.

    Attributes:
        id: whose, unique in the fleet: one count is kept under it wherever the requests come in.
        name: what is limited, as clients are told: `key`, `user` or `tier`.
        rate: requests a minute on average.
        burst: requests at once.
    """

    id: str
    name: str
    rate: float
    burst: float


class Principal(msgspec.Struct, frozen=True, gc=False):
    """Who asks: the result of authentication.

    Attributes:
        user: unique within the tenant.
        tenant: who pays.
        tier: index into the configured tiers.
        limits: what each of its requests counts towards.
        models: the only models it may ask; empty for all.
        key: id of its key, empty where there is none.
    """

    user: str
    tenant: str
    tier: int
    limits: tuple[Limit, ...] = ()
    models: frozenset[str] = frozenset()
    key: str = ""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An API key as it is kept: all but the secret.

    Attributes:
        id: the part of the key's text by which it is looked up.
        digest: SHA-256 of the secret.
        user, tenant: whose.
        tier: name of the tier.
        models: the only models it may ask; empty for all.
        rate: requests a minute of this key; None: the key counts towards its user's limit; 0: no limit.
        burst: requests at once; None: ten seconds' worth of the rate.
        created_at: Unix time in seconds.
        expires_at: Unix time from which it is not valid; None: never. A revoked key has expired.
        replaces: id of the key that it was made to replace, empty for none.
    """

    id: str
    digest: bytes
    user: str
    tenant: str
    tier: str
    models: tuple[str, ...] = ()
    rate: float | None = None
    burst: float | None = None
    created_at: float
    expires_at: float | None = None
    replaces: str = ""
