"""Principals made from a credential's data: the tier by its index, and the limits of its requests."""

from __future__ import annotations

from collections.abc import Iterable

from headway.config import Settings
from headway.model import Limit, Principal

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

    Raises:
        ValueError: the tier does not exist.
    """
    limits = []
    if rate is not None:
        limits.append(_limit(f"key\0{key}", "key", rate, burst))
    else:
        limits.append(_limit(f"user\0{tenant}\0{user}", "user", settings.user_rate, settings.user_burst or None))
    limits.append(_limit(f"tier\0{tier}", "tier", settings.tier_rate(tier), None))
    return Principal(
        user=user,
        tenant=tenant,
        tier=settings.tier_names.index(tier),
        limits=tuple(limit for limit in limits if limit.rate > 0.0),
        models=frozenset(models),
        key=key,
    )


def _limit(id: str, name: str, rate: float, burst: float | None) -> Limit:
    return Limit(id, name, rate, max(1.0, rate * BURST_SECONDS / 60 if burst is None else burst))
