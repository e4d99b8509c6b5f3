"""Principals and their limits: in whose name a request comes, and how much that principal may ask."""

from __future__ import annotations

import msgspec


class Limit(msgspec.Struct, frozen=True, gc=False):
    """A rate limit that a request counts towards.

    Attributes:
        id: name of the count, unique in the fleet: all gateways charge the same count.
        name: what is limited, as clients are told: `key`, `user` or `tier`.
        rate: requests per minute on average.
        burst: requests at once.
    """

    id: str
    name: str
    rate: float
    burst: float


class Principal(msgspec.Struct, frozen=True, gc=False):
    """Result of authentication: the user, the tenant and what they may ask.

    Attributes:
        user: unique within the tenant.
        tenant: name of the account that pays.
        tier: index into the configured tiers.
        limits: rate limits that each of its requests counts towards.
        models: the only models that it may ask; empty for all.
        key: id of its API key; empty where there is none.
    """

    user: str
    tenant: str
    tier: int
    limits: tuple[Limit, ...] = ()
    models: frozenset[str] = frozenset()
    key: str = ""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An API key as it is stored: all but the secret.

    Attributes:
        id: part of the key's text by which the key is found.
        digest: SHA-256 of the secret.
        user, tenant: owner of the key.
        tier: name of the tier.
        models: the only models that it may ask; empty for all.
        rate: requests per minute of this key; None: the key counts towards its user's limit; 0: no limit.
        burst: requests at once; None: ten seconds' worth of the rate.
        created_at: Unix time in seconds.
        expires_at: Unix time in seconds from which it is not valid; None: never. A revoked key has expired.
        replaces: id of the key that it was made to replace; empty for none.
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
