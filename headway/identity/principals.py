"""Principals made from a credential's data: the tier by its index, and the limits of its requests."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headway.config import Settings
from headway.model import Limit, ModelLimit, Principal

BURST_SECONDS = 10.0
"""Seconds' worth of the rate that may come at once, by default."""


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
    """Make the principal of one credential.

    Arguments:
        settings: settings of the tiers and their rates, and the rate of users.
        user: unique within the tenant.
        tenant: name of the account that pays.
        tier: name of a tier.
        key: id of the API key; empty where there is none.
        rate: requests per minute of this key alone; None: it counts towards its user's limit; 0: no limit.
        burst: requests of this key at once; None: ten seconds' worth.
        models: the only models that the principal may ask; empty for all.
        model_limits: limits of its requests for single models: of this key alone or, without a key, of the user.

    Raises:
        ValueError: the tier does not exist.
    """
    of_user, of_key = f"user\0{tenant}\0{user}", f"key\0{key}"
    limits = []
    if rate is not None:
        limits.append(_limit(of_key, "key", rate, burst))
    else:
        limits.append(_limit(of_user, "user", settings.user_rate, None))
    limits.append(_limit(f"tier\0{tier}", "tier", settings.tier_rate(tier), None))
    principal = Principal(
        user=user,
        tenant=tenant,
        tier=settings.tier_names.index(tier),
        limits=tuple(limit for limit in limits if limit.rate > 0.0),
        models=frozenset(models),
        key=key,
    )
    of_models = {}
    for one in (one for one in model_limits if one.rate > 0.0):
        own = _limit(f"{of_key if key else of_user}\0{one.model}", "model", one.rate, one.burst, one.model)
        of_models[one.model] = msgspec.structs.replace(principal, limits=(*principal.limits, own))
    return msgspec.structs.replace(principal, of_models=of_models) if of_models else principal


def _limit(id: str, name: str, rate: float, burst: float | None, model: str = "") -> Limit:
    return Limit(id, name, rate, max(1.0, rate * BURST_SECONDS / 60 if burst is None else burst), model)
