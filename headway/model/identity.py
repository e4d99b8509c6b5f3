"""Principals and their limits: who sends a request, and how many requests they may send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class Limit(msgspec.Struct, frozen=True, gc=False):
    """A rate limit that a request counts towards."""

    id: str  # Name of the counter, unique in the fleet. All gateways use the same counter.
    name: str  # `key`, `user`, `tier` or `model`.
    rate: float  # Average requests per minute.
    burst: float  # Maximum number of requests at a time.
    model: str = ""  # Model that the limit is for, or empty for all models.
    counting: int = 1  # Number of requests that each counted request represents. Rate and burst are divided by it.


class ModelLimit(msgspec.Struct, frozen=True, gc=False):
    """Limit on a credential's requests for one model, in addition to its other limits."""

    model: str
    rate: float  # Requests per minute, above 0.
    burst: float | None = None  # Maximum number of requests at a time. None means the rate times ten seconds.


class Principal(msgspec.Struct, frozen=True, gc=False):
    """Result of authentication: the user, the tenant, and what they may use."""

    user: str  # Name of the user, unique within the tenant.
    tenant: str  # Name of the account that is charged.
    tier: int  # Index into the configured tiers.
    limits: tuple[Limit, ...] = ()  # Rate limits that each of its requests counts towards.
    models: frozenset[str] = frozenset()  # Models that it may use, or empty for all.
    key: str = ""
    of_models: Mapping[str, Principal] = {}  # For each model with an extra limit, the principal with that limit.

    def asking(self, model: str) -> Principal:
        """Return the principal for a request to `model`. It includes the model's extra limit, if there is one."""
        return self.of_models.get(model, self)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An API key as stored, without its secret."""

    id: str  # Part of the key by which it is looked up.
    digest: bytes  # SHA-256 of the secret.
    user: str
    tenant: str
    tier: str  # Name of the tier.
    models: tuple[str, ...] = ()  # Models that it may use, or empty for all.
    rate: float | None = None  # Requests per minute; 0: no limit; None: the key counts towards its user's limit.
    burst: float | None = None  # Maximum number of requests at a time. None means the rate times ten seconds.
    created_at: float  # Unix time in seconds.
    expires_at: float | None = None  # Unix time in seconds, or None for never. A revoked key expires immediately.
    replaces: str = ""  # Id of the key that it replaces, or empty.
    model_limits: tuple[ModelLimit, ...] = ()  # Additional limits for individual models.


def check_new(key: ApiKey, alike: Iterable[ApiKey]) -> None:
    """Check that a new key can be stored. Raises ValueError if its id is taken, or if the key that it replaces already has a
    valid replacement. `alike` are the stored keys with its id, and those that replace the same key. No key may be added during
    the check."""
    for other in alike:
        if other.id == key.id:
            raise ValueError(f"a key with the id {key.id!r} already exists")
        valid = other.expires_at is None or other.expires_at > key.created_at
        if key.replaces and other.replaces == key.replaces and valid:
            raise ValueError(f"{key.replaces} has just been replaced by {other.id}, which is still valid")
