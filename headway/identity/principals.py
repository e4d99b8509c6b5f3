"""Principals of credentials, an identity without authentication, and one that combines API keys with tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from headway.config import Settings
from headway.model import Limit, ModelLimit, Principal
from headway.ports import Identity, KeyIdentity, WatchedIdentity

BURST_SECONDS = 10.0  # The default burst is as many requests as the rate allows in this time.
_OWN = b"hw_live_"


class AnonymousIdentity:
    """Identity that ignores credentials, and returns the same anonymous principal for every request."""

    def __init__(self, tier: int) -> None:
        self._principal = Principal(user="anonymous", tenant="default", tier=tier)

    def identify(self, authorization: bytes) -> Principal | None:
        return self._principal


class CombinedIdentity(WatchedIdentity, KeyIdentity):
    """Identity for both API keys and JSON Web Tokens. A token has two dots, and a key has none."""

    def __init__(self, keys: Identity, tokens: Identity) -> None:
        self._keys = keys.identify
        self._watch = keys.watch if isinstance(keys, WatchedIdentity) else None
        self._tokens = tokens.identify
        self._principal_of = keys.principal_of if isinstance(keys, KeyIdentity) else None

    def identify(self, authorization: bytes) -> Principal | None:
        return self._tokens(authorization) if _is_token(authorization) else self._keys(authorization)

    def watch(self, authorization: bytes) -> Callable[[], Principal | None] | None:
        return None if self._watch is None or _is_token(authorization) else self._watch(authorization)

    def principal_of(self, key: str) -> Principal | None:
        return None if self._principal_of is None else self._principal_of(key)


def _is_token(authorization: bytes) -> bool:
    credential = authorization[7:].strip()
    return credential.count(b".") == 2 and not credential.startswith(_OWN)


def make_principal(
    settings: Settings,
    user: str,
    tenant: str,
    tier: str,
    *,
    key: str = "",
    rate: float | None = None,
    burst: float | None = None,
    models: Iterable[str] = (),
    model_limits: Iterable[ModelLimit] = (),
) -> Principal:
    """Create the principal of a credential, with its rate limits. Raises ValueError if there is no such tier.

    `key` is the id of an API key, or empty. `rate` is the number of requests per minute with this key, or 0 for no limit;
    if None, the user's limit applies. `burst` is how many requests may come at once. `models` are the only models that the
    principal may use, or empty for all. `model_limits` apply to the key or, if there is none, to the user."""
    user_limit, key_limit = f"user\0{tenant}\0{user}", f"key\0{key}"
    by_user = _limit(user_limit, "user", settings.user_rate, None)
    limits = (
        by_user if rate is None else _limit(key_limit, "key", rate, burst),
        _limit(f"tier\0{tier}", "tier", settings.tier_rate(tier), None),
    )
    principal = Principal(
        user=user,
        tenant=tenant,
        tier=settings.tier_names.index(tier),
        limits=tuple(limit for limit in limits if limit.rate > 0.0),
        models=frozenset(models),
        key=key,
    )
    of_models = {}
    for limit in (limit for limit in model_limits if limit.rate > 0.0):
        id = f"{key_limit if key else user_limit}\0{limit.model}"
        own = _limit(id, "model", limit.rate, limit.burst, limit.model)
        of_models[limit.model] = msgspec.structs.replace(principal, limits=(*principal.limits, own))
    return msgspec.structs.replace(principal, of_models=of_models) if of_models else principal


def _limit(id: str, name: str, rate: float, burst: float | None, model: str = "") -> Limit:
    return Limit(id, name, rate, max(1.0, rate * BURST_SECONDS / 60 if burst is None else burst), model)
