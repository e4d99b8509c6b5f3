"""Principals and their limits: who sends a request, and how much they may ask."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Limit(msgspec.Struct, frozen=True, gc=False):
    """A rate limit that a request counts towards.

    Attributes:
        id: name of the count, unique in the fleet. All gateways charge the same count.
        name: what is limited, which is `key`, `user`, `tier` or `model`.
        rate: average requests per minute.
        burst: requests at once.
        model: name of the model, if the limit is for one model only.
        counting: number of requests for which each counted request stands. Rate and burst are divided by it.
    """

    id: str
    name: str
    rate: float
    burst: float
    model: str = ""
    counting: int = 1


class ModelLimit(msgspec.Struct, frozen=True, gc=False):
    """Limit on a credential's requests for one model, in addition to its other limits.

    Attributes:
        rate: requests per minute, above 0.
        burst: requests at once. None means ten seconds' worth of the rate.
    """

    model: str
    rate: float
    burst: float | None = None


class Principal(msgspec.Struct, frozen=True, gc=False):
    """Result of authentication: the user, the tenant, and what they may ask.

    Attributes:
        user: name of the user, unique within the tenant.
        tenant: name of the account that pays.
        tier: index into the configured tiers.
        limits: rate limits that each of its requests counts towards.
        models: models that it may ask, or empty for all.
        of_models: principal with a model's extra limit, by model.
    """

    user: str
    tenant: str
    tier: int
    limits: tuple[Limit, ...] = ()
    models: frozenset[str] = frozenset()
    key: str = ""
    of_models: Mapping[str, Principal] = {}

    def asking(self, model: str) -> Principal:
        """Return the principal for a request to `model`, with that model's extra limit if there is one."""
        return self.of_models.get(model, self)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An API key as stored, without its secret.

    Attributes:
        id: part of the key's text by which the key is found.
        digest: SHA-256 of the secret.
        tier: name of the tier.
        models: models that it may ask, or empty for all.
        rate: requests per minute, or 0 for no limit. None means that the key counts towards its user's limit.
        burst: requests at once. None means ten seconds' worth of the rate.
        created_at: Unix time in seconds.
        expires_at: Unix time in seconds from which it is invalid, if any. Revoking a key makes it expire.
        replaces: id of the key that it replaces, or empty.
        model_limits: additional limits for single models.
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
    model_limits: tuple[ModelLimit, ...] = ()
